"""A new method is a folder, a row of the table and a recipe.

A toy method in a test folder goes through every command that takes a draft.
"""

import json
from pathlib import Path

import pytest

from specdistill.methods import METHODS, MethodInfo
from tests.refusals import refused_key
from tests.scripts import specdistill
from tests.tiny import tiny_target_model, tiny_tokenizer

RECIPE = Path(__file__).parent / "block" / "recipe.yaml"
TEXTS = [
    "the cat sat on the mat and so on",
    "aaaa bbbb cccc dddd eeee",
    "one two two three three three",
    "a b c d e f g",
    "zz zz zz zz",
]


@pytest.fixture(scope="module")
def table():
    """The table of methods with the one row that a new method adds to the library."""
    row = MethodInfo("drafts a block in one pass", passes="1", package="tests.methods.block")
    METHODS["block"] = row
    yield METHODS
    del METHODS["block"]


@pytest.fixture(scope="module")
def workspace(table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, texts, prompts, a gate that passes and a run of the toy method."""
    folder = tmp_path_factory.mktemp("block")
    tiny_target_model().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8"
    )
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS), encoding="utf-8"
    )
    (folder / "gate.yaml").write_text(
        "- {metric: lossless.greedy_identical, equals: true}\n", encoding="utf-8"
    )
    keys = [
        f"recipe={RECIPE}",
        f"target.model={folder / 'target'}",
        f"data.source={folder / 'texts.jsonl'}",
        f"data.cache_dir={folder / 'cache'}",
        f"train.output_dir={folder / 'run'}",
        f"eval.suite={folder / 'prompts.jsonl'}",
        f"gate={folder / 'gate.yaml'}",
    ]
    assert specdistill("train", *keys).returncode == 0
    return folder


def test_a_new_method_trains_a_draft(workspace: Path):
    assert json.loads((workspace / "run" / "draft" / "config.json").read_text(encoding="utf-8"))[
        "architectures"
    ] == ["ToyBlock"]
    log = json.loads((workspace / "run" / "run" / "history.json").read_text(encoding="utf-8"))[
        "log"
    ]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) == 6 and losses[-1] < losses[0]
    slot_names = [
        {f"eval_{name}_{k}" for k in range(1, 4)} for name in ("loss", "accuracy", "acceptance")
    ]
    assert all(names <= log[-1].keys() | log[-2].keys() for names in slot_names)


def test_a_new_method_decodes_losslessly_and_passes_a_gate(workspace: Path):
    assert (
        specdistill("eval", f"recipe={workspace / 'run' / 'run' / 'recipe.yaml'}").returncode == 0
    )
    report = json.loads((workspace / "run" / "report" / "report.json").read_text(encoding="utf-8"))
    assert (report["draft"]["method"], report["lossless"]["greedy_identical"]) == ("block", True)
    row = report["results"][0]
    assert row["num_drafts"] > 0 and row["num_draft_tokens"] == 3 * row["num_drafts"]
    # Acceptance is known only at the K that was measured, and a round of any length is one pass.
    assert [point["k"] for point in report["theory"]["curve"]] == [0, 3]
    assert report["theory"]["curve"][-1]["draft_passes"] == 1


@pytest.mark.parametrize(
    "tree",
    [
        "{branching: [2, 2]}",
        # a measurement each
        pytest.param("{budget: 5, depth: 3, top_k: 2}", marks=pytest.mark.long),
    ],
)
def test_trees_of_a_new_method_are_lossless(workspace: Path, tree: str):
    output = workspace / f"tree-{len(tree)}"
    keys = [
        f"target={workspace / 'target'}",
        "method=block",
        f"draft={workspace / 'run' / 'draft'}",
        f"suite={workspace / 'prompts.jsonl'}",
    ]
    options = [
        "eval.max_new_tokens=16",
        "eval.repeats=1",
        "eval.warmup=0",
        "eval.sampling_draws=0",
        f"eval.tree={tree}",
    ]
    assert (
        specdistill(
            "eval", *keys, *options, f"gate={workspace / 'gate.yaml'}", f"output_dir={output}"
        ).returncode
        == 0
    )
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert report["lossless"]["greedy_identical"] and report["results"][0]["num_drafts"] > 0


def test_the_doctor_examines_a_draft_of_a_new_method(workspace: Path):
    suite = f"suite={workspace / 'prompts.jsonl'}"
    draft, target = f"draft={workspace / 'run' / 'draft'}", f"target={workspace / 'target'}"
    printed = specdistill("doctor", draft, target, suite, "eval.num_prompts=1").stdout
    assert "method block" in printed and "acceptance length" in printed


@pytest.mark.long  # a whole plan
def test_a_plan_has_a_row_for_a_new_method(workspace: Path):
    ended = specdistill("plan", f"target={workspace / 'target'}", "hub=false", "--json")
    assert ended.returncode == 0
    rows = {row["method"]: row for row in json.loads(ended.stdout)["methods"]}
    assert rows["block"]["available"] and rows["block"]["parameters"] == 1


def test_an_export_of_a_new_method_is_refused(workspace: Path):
    ended = specdistill(
        "export",
        f"draft={workspace / 'run' / 'draft'}",
        "engine=vllm",
        f"output_dir={workspace / 'served'}",
    )
    assert (
        ended.returncode == 2
        and refused_key(ended.stderr) == "engine"
        and not (workspace / "served").exists()
    )


@pytest.mark.long  # measures two drafts
def test_a_new_method_is_compared_with_others(workspace: Path):
    keys = [
        f"drafts=[{workspace / 'run' / 'draft'},ngram]",
        f"target={workspace / 'target'}",
        f"suite={workspace / 'prompts.jsonl'}",
    ]
    options = [
        "max_new_tokens=16",
        "repeats=1",
        "warmup=0",
        "sampling_draws=0",
        "num_speculative_tokens=3",
    ]
    assert (
        specdistill("compare", *keys, *options, f"output_dir={workspace / 'comparison'}").returncode
        == 0
    )
    comparison = json.loads(
        (workspace / "comparison" / "comparison.json").read_text(encoding="utf-8")
    )
    assert {candidate["report"]["draft"]["method"] for candidate in comparison["candidates"]} == {
        "block",
        "ngram",
    }


def test_a_new_method_and_another_refuse_each_others_keys(workspace: Path):
    common = [
        f"recipe={RECIPE}",
        f"target.model={workspace / 'target'}",
        "data.source=pico",
        f"train.output_dir={workspace / 'x'}",
    ]
    for key, setting in (
        ("draft.ttt_steps", "draft.ttt_steps=3"),
        ("draft.block_size", "method=eagle"),
    ):
        ended = specdistill("train", *common, setting)
        assert ended.returncode == 2 and refused_key(ended.stderr) == key
