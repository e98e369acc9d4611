"""eval/compare.py compares drafts on disk and writes the comparison's folder."""

import json
import re

import pytest

from specdistill.cli.command import run
from specdistill.common.errors import ExitCode
from specdistill.evaluation.comparison import candidates
from specdistill.evaluation.gate.decide import GateOptions, judge_again
from specdistill.evaluation.measurement import runner
from specdistill.evaluation.measurement.cache import MeasurementCache
from specdistill.evaluation.report.files import validate_report
from specdistill.methods.lookups.method import LookupProposer
from specdistill.recipe.short_keys import COMPARE
from specdistill.targets.frozen import FrozenTarget
from tests.draft_models import other_tokenizer, tiny_draft_model
from tests.heads import build_head, save_head
from tests.mtp_targets import tiny_model
from tests.refusals import refused_key
from tests.scripts import REPORT_FILES as FILES
from tests.scripts import load_script
from tests.tiny import tiny_target_model, tiny_tokenizer

eval_compare = load_script("eval/compare.py")
FIRST, TREE, TOKENS = "lookup_first", "lookup_first.draft_tree", "lookup_first.draft_tokens"
HISTORY = {
    "seconds": 7.5,
    "steps": 4,
    "log": [{"step": 2, "eval_acceptance_length": 1.2}, {"step": 4, "eval_acceptance_length": 1.3}],
}


def run_compare(*arguments):
    return run(eval_compare.main, eval_compare.CompareOptions, list(arguments), shorthands=COMPARE)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Return a folder with a target, a suite, a trained run and further drafts.

    The drafts are the run's head, a draft model, a head for a wider target and a draft of another
    family.
    """
    folder = tmp_path_factory.mktemp("work")
    model, tokenizer = tiny_target_model(num_layers=3), tiny_tokenizer()
    smaller, wider = (
        tiny_target_model(num_layers=1),
        tiny_target_model(num_layers=3, hidden_size=128),
    )
    for name, saved in (("target", model), ("small", smaller)):
        saved.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, owner in (("run/draft", model), ("wide", wider)):
        head = build_head("eagle3", FrozenTarget(owner, tokenizer, name="tiny"))
        save_head("eagle3", head, folder / name)
    foreign = other_tokenizer("a")
    tiny_draft_model(len(foreign), seed=2).save_pretrained(folder / "foreign")
    foreign.save_pretrained(folder / "foreign")
    (folder / "run" / "run").mkdir()
    (folder / "run" / "run" / "history.json").write_text(json.dumps(HISTORY))
    rows = [
        {"id": f"{kind}{n}", "category": kind, "prompt": f"{kind} {n} {kind} {n} "}
        for kind in "ab"
        for n in range(2)
    ]
    (folder / "suite.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def arguments(work, tmp_path, monkeypatch):
    """Return arguments of as short a measurement as there is, from that folder into `tmp_path`."""
    monkeypatch.chdir(work)
    quick = ("max_new_tokens=8", "repeats=1", "warmup=0", "sampling_draws=0")
    return ["target=./target", "suite=suite.jsonl", f"output_dir={tmp_path / 'out'}", *quick]


def read_candidate(folder):
    """Return a candidate's report and the rounds of all its prompts."""
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return json.loads((folder / "report.json").read_text()), [
        entry for sample in samples for entry in sample["rounds"]
    ]


def test_a_comparison_leaves_its_pages_and_every_report(arguments, tmp_path, capsys):
    assert run_compare(*arguments, "drafts=[run/draft,small,ngram]") == ExitCode.DONE
    out = tmp_path / "out"
    names = ["draft", "small", "ngram"]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["comparison.html", "comparison.json", "comparison.md", *names]
    )
    comparison = json.loads((out / "comparison.json").read_text())
    assert [candidate["name"] for candidate in comparison["candidates"]] == names
    trained, *others = (candidate["training"] for candidate in comparison["candidates"])
    assert trained == {"seconds": 7.5, "steps": 4, "curve": [[2, 1.2], [4, 1.3]]}
    assert others == [None, None]
    assert all(entry["lossless"] for entry in comparison["ranking"])
    reports = [candidate["report"] for candidate in comparison["candidates"]]
    assert [report["draft"]["method"] for report in reports] == ["eagle3", "draft_model", "ngram"]
    # The baseline is measured once, for all drafts.
    assert len({report["results"][0]["baseline_tokens_per_second"] for report in reports}) == 1
    for name, report in zip(names, reports, strict=True):
        assert sorted(path.name for path in (out / name).iterdir()) == FILES
        assert json.loads((out / name / "report.json").read_text()) == report
        validate_report(report)
    samples = [
        [json.loads(line)["id"] for line in (out / name / "samples.jsonl").read_text().splitlines()]
        for name in names
    ]
    assert samples == [["a0", "a1", "b0", "b1"]] * 3
    (tmp_path / "any.yaml").write_text("- {metric: lossless.greedy_identical, equals: true}\n")
    judge_again(
        GateOptions(report=str(out / "ngram"), gates=str(tmp_path / "any.yaml"))
    )  # a report of a comparison is judged like any other
    page = (out / "comparison.html").read_text()
    assert "7.5 s" in page
    printed = capsys.readouterr().out
    assert f"comparison: {out / 'comparison.html'}" in printed
    assert all(name in printed for name in names)


def test_a_comparison_resumes_with_the_prompt_that_was_interrupted(
    arguments, tmp_path, monkeypatch, capsys
):
    decoded, append_batch = [], MeasurementCache.append_batch
    keys = (*arguments, "drafts=[small,ngram]")

    def append_or_interrupt(cache, fingerprint, generations):
        if len(decoded) == 3:
            raise KeyboardInterrupt
        decoded.append(generations)
        append_batch(cache, fingerprint, generations)

    with monkeypatch.context() as patch:
        patch.setattr(MeasurementCache, "append_batch", append_or_interrupt)
        assert run_compare(*keys) == ExitCode.INTERRUPTED
    capsys.readouterr()
    assert run_compare(*keys) == ExitCode.DONE
    said = capsys.readouterr().err
    assert (
        "Resuming: 3 batches were decoded before" in said
        and "4 prompts, 1 times each: 1 of 1 runs, took" in said
    )
    rounds = read_candidate(tmp_path / "out" / "small")[1]
    expected = [entry for ways in decoded for entry in ways[1][0].rounds]
    assert [tuple(entry["emitted"]) for entry in rounds][: len(expected)] == [
        entry.emitted for entry in expected
    ]
    assert not (tmp_path / "out" / "configurations").exists()
    assert "The measurement takes about" in said


def test_options_of_one_method_go_to_its_candidates(arguments, tmp_path):
    told = ("ngram.min=2", "ngram.max=5", "ngram.lookup=prompt")
    assert (
        run_compare(*arguments, "drafts=[run/draft,small,ngram]", "num_prompts=2", *told)
        == ExitCode.DONE
    )
    assert [
        read_candidate(tmp_path / "out" / name)[0]["settings"]["drafting"]
        for name in ("draft", "small", "ngram")
    ] == [
        {},
        {},
        {"min": 2, "max": 5, "lookup": "prompt"},
    ]


def test_a_draft_is_compared_with_itself_behind_an_ngram_lookup(arguments, tmp_path):
    keys = [
        "drafts=[run/draft,run/draft,ngram]",
        "num_speculative_tokens_each=[2,4,4]",
        "max_new_tokens=16",
        "num_prompts=2",
    ]
    assert (
        run_compare(*arguments, *keys, f"{FIRST}_each=[null,{{min: 1, draft_tokens: 1}},null]")
        == ExitCode.DONE
    )
    folder = tmp_path / "out" / "ngram+draft"
    report, rounds = read_candidate(folder)
    assert report["settings"]["drafting"] == {
        FIRST: {"method": "ngram", "min": 1, "max": 5, "draft_tokens": 1}
    }
    assert report["draft"]["model"] == "run/draft"
    # The curve has K = 0 and K alone, at the cost of what a round drafts.
    row, theory = report["results"][0], report["theory"]
    a_round = row["draft_ms"] * row["num_draft_tokens"] / row["num_rounds"]
    assert theory["c"] * theory["K"] * row["baseline_step_ms"] == pytest.approx(a_round)
    assert [(point["k"], point["draft_passes"]) for point in theory["curve"]] == [(0, 0), (4, 0)]
    # The draft proposes one token, and the n-gram lookup four.
    assert {len(entry["drafted"]) for entry in rounds} == {1, 4}
    told = "ngram lookup of 1 to 5 tokens first, behind it a chain of 1"
    pages = (
        folder / "report.md",
        tmp_path / "out" / "comparison.md",
        tmp_path / "out" / "comparison.html",
    )
    assert all(told in page.read_text() for page in pages)


def test_suffix_decoding_is_compared_alone_and_in_front_of_a_draft(arguments, tmp_path):
    keys = ["drafts=[run/draft,suffix]", "num_prompts=2", "suffix.max=8"]
    assert (
        run_compare(*arguments, *keys, f"{FIRST}_each=[{{method: suffix}},null]") == ExitCode.DONE
    )
    settings = [
        read_candidate(tmp_path / "out" / name)[0]["settings"]["drafting"]
        for name in ("suffix+draft", "suffix")
    ]
    assert (
        settings[0] == {FIRST: {"method": "suffix", "min": 2, "max": 5, "draft_tokens": 2}}
        and settings[1]["max"] == 8
    )


def test_a_draft_drafts_a_tree_behind_an_ngram_lookup(arguments, tmp_path):
    keys = [
        "drafts=[run/draft,run/draft]",
        "num_speculative_tokens_each=[2,4]",
        "max_new_tokens=16",
        "num_prompts=2",
    ]
    assert (
        run_compare(
            *arguments, *keys, f"{FIRST}_each=[null,{{min: 1, draft_tree: {{branching: [2,2]}}}}]"
        )
        == ExitCode.DONE
    )
    folder = tmp_path / "out" / "ngram+draft"
    report, rounds = read_candidate(folder)
    drafting = report["settings"]["drafting"][FIRST]
    assert drafting["draft_tree"] == {"branching": [2, 2]} and report["settings"]["tree"] is None
    assert report["lossless"]["greedy_identical"]
    # The chain of the n-gram lookup has no such nodes; the tree of 6 nodes, 2 deep, has 4.
    assert {entry.get("num_off_path", 0) for entry in rounds} == {0, 4}
    assert (
        "ngram lookup of 1 to 5 tokens first, behind it a tree with branching 2, 2"
        in (folder / "report.md").read_text()
    )


def test_a_target_that_reads_no_trees_is_refused_before_anything_is_measured(
    arguments, tmp_path, capsys
):
    tiny_model("qwen3_next").save_pretrained(tmp_path / "recurrent")
    tiny_tokenizer().save_pretrained(tmp_path / "recurrent")
    keys = [f"target={tmp_path / 'recurrent'}", "drafts=[small,ngram]"]
    assert (
        run_compare(*arguments, *keys, f"{FIRST}_each=[{{draft_tree: {{branching: [2]}}}},null]")
        == ExitCode.USER_ERROR
    )
    assert (
        refused_key((printed := capsys.readouterr()).err) == "tree"
        and "Measuring" not in printed.err
    )
    assert not (tmp_path / "out").exists()


def test_each_draft_has_its_own_k_or_tree_over_one_baseline(arguments, tmp_path):
    keys = [
        "num_speculative_tokens_each=[2,3,1]",
        "trees_each=[{branching: [2,2]},null,null]",
        "num_prompts=2",
    ]
    assert run_compare(*arguments, "drafts=[run/draft,small,ngram]", *keys) == ExitCode.DONE
    baselines = set()
    for name, k in {"draft": 2, "small": 3, "ngram": 1}.items():
        report, rounds = read_candidate(tmp_path / "out" / name)
        row = report["results"][0]
        baselines.add(row["baseline_tokens_per_second"])
        assert (
            report["settings"]["num_speculative_tokens"] == len(row["accepted_per_position"]) == k
        )
        assert report["settings"]["tree"] == ({"branching": [2, 2]} if name == "draft" else None)
        assert max(len(round["drafted"]) for round in rounds) == k
        assert {round.get("num_off_path", 0) for round in rounds} == {4 if name == "draft" else 0}
        assert report["lossless"]["greedy_identical"]
    assert len(baselines) == 1


def test_categories_have_rows_of_all_drafts(arguments, tmp_path):
    assert run_compare(*arguments, "drafts=[run/draft,ngram]") == ExitCode.DONE
    page = (
        (tmp_path / "out" / "comparison.md")
        .read_text()
        .partition("## By category")[2]
        .partition("## Why")[0]
    )
    head, _, *rows = page.strip().splitlines()
    assert head.startswith("| category | prompts |") and "draft" in head and "ngram" in head
    report, _ = read_candidate(tmp_path / "out" / "draft")
    for row, line in zip(report["results"], rows, strict=True):
        assert f"{row['speedup']:.2f}×" in line and f"| {row['num_prompts']} |" in line
    table = (
        (tmp_path / "out" / "comparison.html")
        .read_text()
        .partition("<h2>By category</h2>")[2]
        .partition("</thead>")[0]
    )
    # The page shows names unchanged.
    assert {">category<", ">draft<", ">ngram<"} <= {
        f">{part}" for part in re.findall(r">([^>]+<)", table)
    }


def test_a_draft_of_another_family_is_compared(arguments, tmp_path, capsys):
    family = (*arguments, "drafts=[foreign,small]", "num_prompts=2")
    assert run_compare(*family) == ExitCode.USER_ERROR
    printed = capsys.readouterr().err
    assert (
        "error: drafts: got a draft of 256 tokens for a target of 260" in printed
        and "heterogeneous_vocab=true" in printed
    )
    assert run_compare(*family, "heterogeneous_vocab=true") == ExitCode.DONE
    comparison = json.loads((tmp_path / "out" / "comparison.json").read_text())
    candidates = {candidate["name"]: candidate for candidate in comparison["candidates"]}
    assert candidates["foreign"]["report"]["settings"]["drafting"]["heterogeneous_vocab"] is True
    assert all(entry["lossless"] for entry in comparison["ranking"])


def test_a_draft_that_changes_the_text_ends_with_exit_code_one(arguments, tmp_path, monkeypatch):
    check = runner.check_greedy

    def mark_others_divergent(target, proposer, *others):
        found = check(target, proposer, *others)
        return (
            found
            if isinstance(proposer, LookupProposer)
            else [{"prompt_id": "p", "near_tie": False}, *found[1:]]
        )

    monkeypatch.setattr(runner, "check_greedy", mark_others_divergent)
    assert run_compare(*arguments, "drafts=[small,ngram]", "num_prompts=2") == ExitCode.CHECK_FAILED
    ranking = json.loads((tmp_path / "out" / "comparison.json").read_text())["ranking"]
    assert [(entry["name"], entry["lossless"]) for entry in ranking] == [
        ("ngram", True),
        ("small", False),
    ]


@pytest.mark.parametrize(
    ("more", "key", "got"),
    [
        ([], "drafts", "nothing"),
        (["drafts=[small]"], "drafts", "1 drafts"),
        (["drafts=[small,./small]"], "drafts", "small and ./small"),
        (["drafts=[small,ngrm]"], "drafts", "ngrm"),
        (["drafts=[run,ngram]"], "drafts", "run, which holds draft, run"),
        (["drafts=[wide,ngram]"], "drafts", "wide"),
        (["drafts=[small,ngram]", "target=./nowhere"], "target", "got ./nowhere"),
        (["drafts=[small,ngram]", "max_new_tokens=400"], "suite", "prompt a0"),
        (
            [
                "drafts=[small,ngram]",
                "num_speculative_tokens=2",
                "num_speculative_tokens_each=[1,2]",
            ],
            "num_speculative_tokens",
            "only used without num_speculative_tokens_each",
        ),
        (
            ["drafts=[small,ngram]", "num_speculative_tokens_each=[1]"],
            "num_speculative_tokens_each",
            "1 value",
        ),
        (
            [
                "drafts=[small,ngram]",
                "num_speculative_tokens_each=[7,2]",
                "trees_each=[{branching: [2,2]},null]",
            ],
            *("num_speculative_tokens", "7"),
        ),
        (["drafts=[small,ngram]", "trees_each=[null]"], "trees_each", "1 value"),
        (
            ["drafts=[small,ngram]", "trees_each=[null,{branching: [2]}]"],
            "tree",
            "LookupProposer drafts chains only",
        ),
        (
            ["drafts=[run/draft,small]", "ngram.max=5"],
            "ngram.max",
            "not used with method eagle3 or draft_model",
        ),
        (
            ["drafts=[run/draft,ngram]", "heterogeneous_vocab=true"],
            "heterogeneous_vocab",
            "not used with method eagle3 or ngram",
        ),
        (
            ["drafts=[small,ngram]", "lookup_first.min=3"],
            f"{FIRST}_each",
            "a lookup in front of ngram",
        ),
        (["drafts=[small,run/draft]", "lookup_first.min=9"], "lookup_first.min", "9"),
        (
            ["drafts=[small,run/draft]", f"{FIRST}_each=[null,{{min: 9}}]"],
            f"{FIRST}_each[1].min",
            "9",
        ),
        (["drafts=[small,ngram]", "ngram={min: 4, max: 3}"], "ngram.min", "4"),
        (
            [
                "drafts=[small,ngram]",
                "trees_each=[{branching: [2,2]},null]",
                f"{FIRST}_each=[{{}},null]",
            ],
            *(f"{FIRST}_each", "a lookup in front of a draft that has a tree"),
        ),
        (
            ["drafts=[small,run/draft]", f"{TREE}={{branching: [2,1,1,1,1]}}"],
            TREE,
            "a tree of depth 5 with K = 4",
        ),
        (
            ["drafts=[small,run/draft]", f"{TREE}={{branching: [2]}}", f"{TOKENS}=1"],
            TOKENS,
            "only used without lookup_first.draft_tree",
        ),
        (
            ["drafts=[small,run/draft]", f"{TREE}={{branching: [2]}}", "compile=true"],
            "compile",
            "true with",
        ),
        (["drafts=[small,run/draft]", f"{TREE}={{budget: 4}}"], f"{TREE}.depth", "nothing"),
        (["drafts=[small,run/draft]", f"{TOKENS}=5"], TOKENS, "5 with K = 4"),
        (["drafts=[small,run/draft]", f"{FIRST}_each=[null]"], f"{FIRST}_each", "1 value"),
        (
            ["drafts=[small,run/draft]", f"{TOKENS}=1", f"{FIRST}_each=[null,{{}}]"],
            f"{FIRST}_each",
            "only used without lookup_first",
        ),
        (["drafts=[small,ngram]", "draft=small"], "draft", "an unknown key"),
        (["drafts=small,ngram", "eval.num_prompts=0"], "eval.num_prompts", "0"),
        (["drafts=small,ngram", "eval.lookup_first.min=9"], "eval.lookup_first.min", "9"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(arguments, tmp_path, capsys, more, key, got):
    assert run_compare(*arguments, *more) == ExitCode.USER_ERROR
    said = capsys.readouterr().err.splitlines()[-1]
    expected = f"error: {key} is required: " if got == "nothing" else f"error: {key}: {got}"
    assert said.replace(": got ", ": ").startswith(expected.replace(": got ", ": "))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "written",
    [
        "{",
        '{"seconds": 1, "steps": 2, "log": null}',
        '{"seconds": 1, "steps": 2, "log": [{"epoch": "x"}]}',
    ],
)
def test_a_history_that_cannot_be_read_is_refused_before_anything_is_measured(
    arguments, work, tmp_path, capsys, monkeypatch, written
):
    monkeypatch.setattr(candidates, "measure", None)
    path = work / "run" / "run" / "history.json"
    path.write_text(written)
    try:
        assert run_compare(*arguments, "drafts=[run/draft,ngram]") == ExitCode.USER_ERROR
    finally:
        path.write_text(json.dumps(HISTORY))
    assert refused_key(printed := capsys.readouterr().err) == "drafts" and "history.json" in printed


def test_help_shows_the_launch_line_and_every_key(capsys):
    assert run_compare("--help") == ExitCode.DONE
    printed = capsys.readouterr().out
    assert "python eval/compare.py target=pico" in printed and "short for target.model" in printed
