"""eval/run.py turns the arguments of the command line into the files of a report."""

import hashlib
import json
import shutil
from functools import partial

import pytest
import torch

from specdistill.cli.command import run
from specdistill.common.errors import ExitCode
from specdistill.evaluation.measurement import runner
from specdistill.evaluation.measurement.cache import MeasurementCache
from specdistill.evaluation.report.files import validate_report
from specdistill.methods.recipe import Recipe
from specdistill.targets.files import TargetFiles
from tests.draft_models import other_tokenizer, tiny_draft_model
from tests.refusals import refused_key
from tests.scripts import REPORT_FILES as FILES
from tests.scripts import evaluate as run_eval
from tests.scripts import load_script
from tests.tiny import save_adapter, tiny_target_model, write_target

eval_run = load_script("eval/run.py")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, num_layers=2)
    return folder


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    path = tmp_path_factory.mktemp("suite") / "small.jsonl"
    rows = [
        {"id": f"{kind}{n}", "category": kind, "prompt": f"{kind} {n} {kind} {n} "}
        for kind in "ab"
        for n in range(2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def gate(tmp_path):
    path = tmp_path / "gate.yaml"
    path.write_text("- {metric: lossless.greedy_identical, equals: true}\n")
    return path


@pytest.fixture
def keys(target, suite, gate, tmp_path):
    """Return keys of as short a measurement as there is, written into `report`."""
    quick = ("eval.max_new_tokens=8", "eval.repeats=1", "eval.warmup=0", "eval.sampling_draws=0")
    return [
        f"target={target}",
        "method=ngram",
        f"suite={suite}",
        f"output_dir={tmp_path / 'report'}",
        f"gate={gate}",
        *quick,
    ]


@pytest.fixture
def run_measurement(keys, tmp_path):
    """Return a function that measures with further keys.

    It returns the report, which fits its schema, and the samples of the folder.
    """

    def measure(*more, code=ExitCode.DONE, folder=tmp_path / "report"):
        assert run_eval(*keys, *more, f"output_dir={folder}") == code
        report = json.loads((folder / "report.json").read_text())
        validate_report(report)
        return report, [
            json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()
        ]

    return measure


def test_a_measurement_leaves_a_whole_report(run_measurement, tmp_path, capsys):
    folder = tmp_path / "report"
    report, samples = run_measurement("eval.num_speculative_tokens=2", "eval.ngram.max=4")
    assert sorted(path.name for path in folder.iterdir()) == FILES
    row = report["results"][0]
    assert (row["category"], row["num_prompts"], len(row["accepted_per_position"])) == ("all", 4, 2)
    assert [entry["category"] for entry in report["results"]] == ["all", "a", "b"]
    assert report["lossless"]["prompts_checked"] == 4
    assert "eval.sampling_draws" in report["not_measured"]["lossless.sampling_test"]
    assert (report["draft"]["method"], report["draft"]["model"], report["draft"]["parameters"]) == (
        "ngram",
        None,
        0,
    )
    assert report["settings"]["draft_sampling"] == "greedy"
    assert report["settings"]["drafting"] == {"min": 1, "max": 4, "lookup": "sequence"}
    assert "n-gram lookup (n = 1 to 4) in prompt and output" in (folder / "report.md").read_text()
    assert report["gate"]["passed"]
    assert report["hardware"]["cpu_threads"] >= 1
    assert [sample["id"] for sample in samples] == ["a0", "a1", "b0", "b1"]
    assert f"report: {folder / 'report.html'}" in capsys.readouterr().out


def test_trees_are_measured_and_reported(run_measurement, tmp_path):
    draft = tmp_path / "draft"
    write_target(draft, num_layers=1)
    tree = "eval.tree={budget: 6, depth: 3, top_k: 2}"
    report, samples = run_measurement("method=draft_model", f"draft={draft}", tree)
    row, settings = report["results"][0], report["settings"]
    assert settings["tree"] == row["tree"] == {"budget": 6, "depth": 3, "top_k": 2}
    assert (
        settings["num_speculative_tokens"]
        == row["num_speculative_tokens"]
        == len(row["accepted_per_position"])
        == 3
    )
    assert row["num_draft_tokens"] == 6 * row["num_drafts"]
    assert row["mean_acceptance_length"] == pytest.approx(
        (row["num_new_tokens"] - row["num_prompts"]) / row["num_rounds"]
    )
    assert row["acceptance_length_vllm"] == pytest.approx(
        1 + row["num_accepted_tokens"] / row["num_drafts"]
    )
    assert report["theory"]["predicted"] == pytest.approx(row["predicted_speedup"])
    assert all(
        len(entry["drafted"]) + entry["num_off_path"] == 6
        for sample in samples
        for entry in sample["rounds"]
    )


@pytest.mark.long  # loads a target for each adapter
def test_one_draft_is_measured_over_several_adapters_each_a_category(
    run_measurement, keys, target, tmp_path, capsys
):
    """Rounds are those with each adapter alone, and each adapter is lossless.

    The draft's record may name the base or one of the adapters.
    """
    for name, alpha in (("maths", 8), ("code", 80)):
        save_adapter(tmp_path / name, str(target), num_layers=2)
        config = json.loads((tmp_path / name / "adapter_config.json").read_text())
        (tmp_path / name / "adapter_config.json").write_text(
            json.dumps({**config, "lora_alpha": alpha})
        )
    adapters = [str(tmp_path / name) for name in ("maths", "code")]
    several = f"target.adapter=[{','.join(adapters)}]"
    report, samples = run_measurement(several, "eval.sampling_draws=20")
    assert [row["category"] for row in report["results"]] == ["all", "maths", "code"]
    assert (report["suite"]["num_prompts"], report["lossless"]["prompts_checked"]) == (
        8,
        8,
    ) and report["gate"]["passed"]
    assert report["target"]["model"] == f"{target.name} + maths, code"
    both = [
        run_measurement(f"target.adapter={adapter}", folder=tmp_path / f"{adapter}-alone")
        for adapter in adapters
    ]
    assert [[sample["rounds"] for sample in alone] for _, alone in both] == [
        [sample["rounds"] for sample in samples if sample["category"] == name]
        for name in ("maths", "code")
    ]
    assert (samples[0]["id"], samples[4]["cluster"]) == ("maths/a0", "a0") and samples[0][
        "rounds"
    ] != samples[4]["rounds"]
    assert (
        len({report["target"]["weights"], *(alone["target"]["weights"] for alone, _ in both)}) == 3
    )
    for row, (alone, _) in zip(report["results"][1:], both, strict=True):
        assert row["num_accepted_tokens"] == alone["results"][0]["num_accepted_tokens"]

    draft = tmp_path / "draft"
    write_target(draft, num_layers=1)
    config, of_draft = (
        json.loads((draft / "config.json").read_text()),
        ("method=draft_model", f"draft={draft}", several),
    )
    identity = vars(TargetFiles(str(target)).identity)
    for made_for in (identity, vars(TargetFiles(str(target), adapter=adapters[1]).identity)):
        (draft / "config.json").write_text(
            json.dumps({**config, "specdistill": {"target": made_for}})
        )
        assert (
            len(run_measurement(*of_draft, "eval.num_prompts=1", folder=tmp_path / "of-draft")[1])
            == 2
        )
    other = {**identity, "weights": "0" * 64}
    (draft / "config.json").write_text(json.dumps({**config, "specdistill": {"target": other}}))
    for key, given in (
        ("draft", of_draft),
        ("target.adapter", [f"target.adapter=[{adapters[0]},{adapters[0]}]"]),
    ):
        capsys.readouterr()
        assert run_eval(*keys, *given) == ExitCode.USER_ERROR
        assert refused_key(capsys.readouterr().err) == key


@pytest.mark.long  # measures several times
def test_suffixes_are_looked_up_in_the_outputs_of_earlier_prompts(run_measurement, tmp_path):
    """Past outputs change the rounds of later prompts, not those of the first.

    This holds whatever the repetition.
    """
    keys = ("method=suffix", "eval.max_new_tokens=24", "eval.temperature=1", "eval.top_k=2")
    report, samples = run_measurement(
        *keys, "eval.sampling_draws=20", "eval.repeats=2", "eval.warmup=1"
    )
    assert report["settings"]["drafting"]["max_cached_requests"] == 10000
    assert report["lossless"]["greedy_identical"] and report["gate"]["verdict"] == "passed"
    once = run_measurement(*keys, folder=tmp_path / "once")[1]
    alone = run_measurement(*keys, "eval.suffix.max_cached_requests=0", folder=tmp_path / "alone")[
        1
    ]
    rounds, of_once, of_alone = (
        [sample["rounds"] for sample in each] for each in (samples, once, alone)
    )
    assert rounds == of_once != of_alone
    assert rounds[0] == of_alone[0]


def test_a_draft_of_another_vocabulary_takes_token_replacements(run_measurement, tmp_path):
    draft = tmp_path / "draft"
    tokenizer = other_tokenizer("a", ("</s>",))
    tiny_draft_model(len(tokenizer), seed=2).save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    told = {
        "heterogeneous_vocab": True,
        "token_replacements": {"<|endoftext|>": "</s>", "<|user|>": "User: "},
    }
    report, _ = run_measurement(
        "method=draft_model",
        f"draft={draft}",
        *(f"eval.{key}={json.dumps(told[key])}" for key in told),
    )
    assert report["settings"]["drafting"] == told
    assert (
        report["lossless"]["greedy_identical"]
        and "token replacements" in (tmp_path / "report" / "report.md").read_text()
    )


@pytest.mark.parametrize(
    ("method", "own", "lengths"),
    [
        ("ngram", 1, {1, 3}),
        pytest.param("suffix", 2, {1, 2}, marks=pytest.mark.long),  # draws as often as the first
    ],
)
def test_a_draft_is_measured_behind_a_lookup(run_measurement, tmp_path, method, own, lengths):
    """One prompt at a time and batches are sampled, tested for sampling and judged."""
    draft = tmp_path / "draft"
    write_target(draft, num_layers=1)
    lookup = f"eval.lookup_first={{method: {method}, min: 1, draft_tokens: {own}}}"
    more = [
        "eval.temperature=1",
        "eval.top_k=3",
        "eval.sweep.batch_size=[2]",
        "eval.sampling_draws=50",
    ]
    report, samples = run_measurement(
        "method=draft_model", f"draft={draft}", lookup, "eval.num_speculative_tokens=3", *more
    )
    assert report["settings"]["drafting"]["lookup_first"] == {
        "method": method,
        "min": 1,
        "max": 5,
        "draft_tokens": own,
    }
    assert (
        report["lossless"]["greedy_identical"]
        and report["lossless"]["sampling_test"]["p_value"] > 1e-3
    )
    assert report["gate"]["verdict"] == "passed"
    assert {len(entry["drafted"]) for sample in samples for entry in sample["rounds"]} == lengths
    if (
        method == "ngram"
        # The texts that a suffix is found in also depend on the batch, and so does which of the
        # possible texts is sampled.
    ):
        assert [sample["text"] for sample in samples[:4]] == [
            sample["text"] for sample in samples[4:]
        ]


@pytest.mark.long  # torch traces three graphs
def test_the_targets_passes_are_compiled(run_measurement, tmp_path, monkeypatch):
    """Passes with and without the draft are compiled, for each K whose cost is timed.

    So are those of the test of sampling. Graphs are traced as for the compiler.
    """
    shapes = []

    def backend(graph, inputs):
        shapes.append(
            {
                tuple(tensor.shape)
                for tensor in inputs
                if tensor.dtype == torch.long and tensor.ndim == 2
            }
        )
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    report, _ = run_measurement(
        "eval.compile=true", "eval.num_speculative_tokens=2", "eval.sampling_draws=20"
    )
    assert report["settings"]["compile"] and report["lossless"]["greedy_identical"]
    assert "compiled" in (tmp_path / "report" / "report.md").read_text()
    widths = sorted(width for of_graph in shapes for _, width in of_graph)
    # One graph for each number of tokens: plain decoding, the shorter draft (and the test of
    # sampling), and the measured draft.
    assert widths == [1, 2, 3]


def test_prompts_are_decoded_in_batches(run_measurement):
    report, samples = run_measurement(
        "eval.batch_size=2", "eval.sweep.batch_size=[1,4]", "eval.num_speculative_tokens=2"
    )
    assert report["settings"]["batch_size"] == 2
    rows = [
        (row["batch_size"], row["num_batches"], row["num_prompts"])
        for row in select_whole_rows(report)
    ]
    assert rows == [(2, 2, 4), (1, 4, 4), (4, 1, 4)]
    assert report["lossless"]["greedy_identical"] and report["lossless"]["prompts_checked"] == 12
    assert [sample["batch"] for sample in samples] == [0, 0, 2, 2, *[None] * 4, *[0] * 4]
    texts = [[sample["text"] for sample in samples[start : start + 4]] for start in (0, 4, 8)]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.usefixtures("simulated_clock")
def test_a_failed_gate_ends_with_exit_code_one_and_leaves_a_report(run_measurement, gate):
    gate.write_text("- {metric: speedup, min: 1000}\n")
    sampled = (
        "eval.temperature=1.0",
        "eval.num_speculative_tokens=1",
        "eval.num_prompts=2",
        "eval.sampling_draws=2",
    )
    report, _ = run_measurement(*sampled, code=ExitCode.CHECK_FAILED)
    assert not report["gate"]["passed"]
    assert report["settings"]["temperature"] == 1.0
    assert report["results"][0]["num_prompts"] == 2
    assert report["lossless"]["greedy_identical"]


@pytest.mark.usefixtures("simulated_clock")
def test_a_run_is_judged_against_a_baseline_and_its_own_budget(
    run_measurement, keys, gate, tmp_path, capsys
):
    gate.write_text(
        "- {metric: speedup, max_regression: 0.95}\n- {metric: measurement.seconds, max: 3600}\n"
    )
    before, _ = run_measurement(code=ExitCode.CHECK_FAILED, folder=tmp_path / "before")
    baseline = f"eval.baseline={tmp_path / 'before'}"
    report, _ = run_measurement(baseline)
    regression, budget = report["gate"]["rules"]
    assert regression["value"] == pytest.approx(
        report["results"][0]["speedup"] / before["results"][0]["speedup"] - 1
    )
    assert 0 < budget["value"] == report["measurement"]["seconds"] < 3600
    # The peak is that of this process, torch and the target included.
    assert report["measurement"]["peak_memory_bytes"] > 50 * 2**20
    assert run_eval(*keys, baseline, "eval.max_new_tokens=6") == ExitCode.USER_ERROR
    assert "error: baseline: got max_new_tokens 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "key", "got"),
    [
        (["eval.batch_size=5"], "eval.batch_size", "5 for 4 prompts"),
        (["eval.baseline=nowhere", "gate=release"], "eval.baseline", "nowhere"),
        (["eval.max_new_tokens=400"], "suite", "prompt a0 of small"),
        (["suite=pcio"], "suite", "pcio"),
        (["gate=defalt"], "gate", "defalt"),
        (["method=eagle3"], "eval.draft", "no trained draft in "),
        (["target=./nowhere"], "target", "./nowhere"),
        (["eval.suite=null"], "eval.suite", "error: eval.suite is required with target "),
        (
            ["method=suffix", "eval.engine=llama.cpp", "eval.sampling_draws=null"],
            "method",
            "suffix with eval.engine=llama.cpp",
        ),
        (["eval.lookup_first={}"], "eval.lookup_first", "method ngram is a lookup itself"),
        (
            ["method=eagle3", "eval.lookup_first={draft_tokens: 9}"],
            "eval.lookup_first.draft_tokens",
            "9 with K = 4",
        ),
        (["method=eagle3", "eval.lookup_first={min: 4, max: 2}"], "eval.lookup_first.min", "4"),
        (
            ["method=eagle3", "eval.lookup_first={}", "eval.engine=sglang"],
            "eval.lookup_first",
            "only used ",
        ),
        (
            ["method=eagle3", "eval.lookup_first={}", "eval.engine=vllm", "eval.server=http://x"],
            "eval.lookup_first",
            "only used ",
        ),
        (
            [
                "method=eagle3",
                "eval.lookup_first={draft_tree: {branching: [2]}}",
                "eval.engine=vllm",
            ],
            "eval.lookup_first.draft_tree",
            (
                '{"budget": null, "depth": null, "top_k": null, "branching": [2]} with'
                " eval.engine=vllm"
            ),
        ),
        (
            ["method=eagle3", "eval.lookup_first={method: suffix}", "eval.engine=vllm"],
            "eval.lookup_first.method",
            "suffix with eval.engine=vllm",
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(keys, tmp_path, capsys, more, key, got):
    assert run_eval(*keys, *more) == ExitCode.USER_ERROR
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.removeprefix(f"error: {key}: ").removeprefix("got ").startswith(got)
    assert not (tmp_path / "report").exists()


def test_an_output_folder_that_cannot_be_written_is_refused(keys, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run_eval(*keys, f"output_dir={tmp_path / 'file' / 'report'}") == ExitCode.USER_ERROR
    assert refused_key(capsys.readouterr().err) == "output_dir"


def test_files_that_no_measurement_wrote_are_kept(run_measurement, keys, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.md").write_text("my thesis")
    assert run_eval(*keys, f"output_dir={tmp_path / 'mine'}") == ExitCode.USER_ERROR
    assert refused_key(capsys.readouterr().err) == "output_dir"
    assert (tmp_path / "mine" / "report.md").read_text() == "my thesis"
    (tmp_path / "report" / "configurations").mkdir(parents=True)
    (tmp_path / "report" / "configurations" / "mine.json").write_text("{}")
    run_measurement()
    assert [path.name for path in (tmp_path / "report" / "configurations").iterdir()] == [
        "mine.json"
    ]
    run_measurement()  # a report replaces an earlier one


def test_shorthands_stand_for_keys_of_the_recipe(capsys):
    seen = []
    options = {
        "shorthands": eval_run.SHORTHANDS,
        "without_recipe": ["train.output_dir=runs/eval", "method=eagle3"],
    }
    run(
        seen.append,
        Recipe,
        ["target=pico", "draft=here", "suite=s", "output_dir=there", "method=eagle"],
        **options,
    )
    run(seen.append, Recipe, ["recipe=pico/draft"], **options)
    without, of_recipe = seen
    assert (without.target.model, without.method, without.train["output_dir"]) == (
        "pico",
        "eagle",
        "runs/eval",
    )
    assert (without.eval.draft, without.eval.suite, without.eval.output_dir) == (
        "here",
        "s",
        "there",
    )
    assert of_recipe.method == "draft_model"
    assert run(eval_run.main, Recipe, ["--help"], **options) == ExitCode.DONE
    assert (
        "short for eval.suite" in (shown := capsys.readouterr().out)
        and "python eval/run.py target=" in shown
    )


def list_seconds(records):
    return [
        (record["configuration"], record["id"], record["speculative"]["seconds"])
        for record in records
    ]


def test_a_sweep_resumes_with_the_configuration_that_was_interrupted(
    run_measurement, keys, tmp_path, monkeypatch
):
    measured_settings, original = [], runner.decode_prompts
    sweep = ("eval.num_speculative_tokens=2", "eval.sweep.num_speculative_tokens=[1]")

    def interrupt_after(number):
        def measure(*given, **options):
            if len(measured_settings) == number:
                raise KeyboardInterrupt
            measured_settings.append(given[2].settings.configuration)
            return original(*given, **options)

        return measure

    monkeypatch.setattr(runner, "decode_prompts", interrupt_after(1))
    assert run_eval(*keys, *sweep) == ExitCode.INTERRUPTED
    (kept,) = tmp_path.glob("report/configurations/*.json")
    kept = list_seconds(json.loads(kept.read_text())["drafts"][0]["records"])
    monkeypatch.setattr(runner, "decode_prompts", interrupt_after(2))
    _, samples = run_measurement(*sweep)
    assert [configuration.num_speculative_tokens for configuration in measured_settings] == [2, 1]
    assert len(samples) == 8 and list_seconds(samples)[:4] == kept


def test_a_measurement_resumes_with_the_prompt_that_was_interrupted(
    run_measurement, keys, tmp_path, monkeypatch, capsys
):
    """It stops after five of the eight runs of its prompts, the last of them cut on the disk."""
    decoded, original = [], MeasurementCache.append_batch
    monkeypatch.setattr(
        runner, "MAX_EXTRA_REPETITIONS", 0
    )  # times of so few tokens are often disturbed

    def append_or_interrupt(cache, fingerprint, generations):
        if len(decoded) == 5:
            raise KeyboardInterrupt
        decoded.append(generations)
        original(cache, fingerprint, generations)

    with monkeypatch.context() as patch:
        patch.setattr(MeasurementCache, "append_batch", append_or_interrupt)
        assert run_eval(*keys, "eval.repeats=2", "eval.warmup=0") == ExitCode.INTERRUPTED
    (path,) = tmp_path.glob("report/configurations/*.jsonl")
    path.write_bytes(path.read_bytes()[:-9])
    capsys.readouterr()
    _, samples = run_measurement("eval.repeats=2", "eval.warmup=0")
    printed = capsys.readouterr().err
    assert "Resuming: 4 batches were decoded before" in printed
    assert "Measuring 4 prompts, 2 times each: 4 of 4 runs, took" in printed
    first = [ways[1][0] for ways in decoded[:4]]  # with the draft, in the first repetition
    assert [tuple(sample["rounds"][0]["emitted"]) for sample in samples] == [
        run.rounds[0].emitted for run in first
    ]
    assert not path.exists()


def test_a_sweep_has_rows_for_every_cell(run_measurement):
    axes = (
        "eval.sweep.num_speculative_tokens=[1,2]",
        "eval.sweep.temperature=[0,1]",
        "eval.sweep.context=[4,8]",
    )
    report, samples = run_measurement("eval.num_speculative_tokens=2", *axes)
    rows = select_whole_rows(report)
    cells = [
        (row["num_speculative_tokens"], row["temperature"], row["context_bucket"]) for row in rows
    ]
    assert cells == [
        (2, 0.0, "all"),
        (1, 0.0, "all"),
        (2, 1.0, "all"),
        (2, 0.0, "4"),
        (2, 0.0, "8"),
    ]
    assert [len(row["accepted_per_position"]) for row in rows] == [2, 1, 2, 2, 2]
    assert {
        sample["num_prompt_tokens"]
        for sample in samples
        if sample["configuration"]["context_bucket"] == "4"
    } == {4}
    assert report["lossless"]["prompts_checked"] == 4 * 4  # the four greedy configurations


def test_a_suite_adds_the_axes_of_a_sweep_that_eval_does_not_set(run_measurement, suite, tmp_path):
    digest = hashlib.sha256(suite.read_bytes()).hexdigest()
    header = {
        "name": "swept",
        "version": "1",
        "licence": "CC0-1.0",
        "source": "made up",
        "sha256": digest,
    }
    path = tmp_path / "swept.yaml"
    path.write_text(
        json.dumps(
            {
                **header,
                "prompts": str(suite),
                "sweep": {"num_speculative_tokens": [1], "context": [4]},
            }
        )
    )
    report, _ = run_measurement(
        f"suite={path}", "eval.num_speculative_tokens=2", "eval.sweep.context=[8]"
    )
    assert [
        (row["num_speculative_tokens"], row["context_bucket"]) for row in select_whole_rows(report)
    ] == [
        (2, "all"),
        (1, "all"),
        (2, "8"),
    ]


def select_whole_rows(report):
    return [row for row in report["results"] if row["category"] == "all"]


@pytest.mark.usefixtures("simulated_clock")
def test_the_smallest_detectable_change_is_logged_before_a_run(run_measurement, capsys):
    run_measurement()
    assert "22.4%" in capsys.readouterr().err  # (1.960 + 0.842) · 0.16 / √4


def test_a_target_that_ends_at_once_gives_a_report_without_nan(run_measurement, target, tmp_path):
    """Every text is its stop token alone: it is counted, and nothing is drafted.

    There is no speed beyond the prefill's, and no NaN anywhere.
    """
    silent = tmp_path / "silent"
    shutil.copytree(target, silent)
    model = tiny_target_model(num_layers=2)
    model.generation_config.eos_token_id = list(range(model.config.vocab_size))
    model.save_pretrained(silent)
    report, samples = run_measurement(f"target={silent}")
    row = report["results"][0]
    assert (row["num_empty"], row["num_new_tokens"], row["num_drafts"]) == (4, 4, 0)
    assert "mean_acceptance_length" not in row
    assert "mean_acceptance_length" in row["not_measured"]
    assert "empty_completions" in [finding["name"] for finding in report["findings"]]
    assert "NaN" not in json.dumps([report, samples])
    assert [len(sample["rounds"]) for sample in samples] == [0] * 4
