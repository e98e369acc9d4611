"""The model card of a head for a target on the Hub: its metadata and its text."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from specdistill.evaluation.gate.decide import Evidence, judge
from specdistill.evaluation.gate.rules import load_gate
from specdistill.hub import card as cards
from specdistill.hub.card import CardContents, format_eval_command
from specdistill.hub.evidence import Release
from specdistill.hub.licenses import Licensed
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.recipe.short_keys import select_recipe_keys
from specdistill.targets.files import TargetIdentity
from specdistill.training.history import History
from tests.rendered import HOSTILE, Page, renamed
from tests.scripts import load_script
from tests.simulated import simulate, simulated_report, simulated_sweep

TARGET = TargetIdentity("Qwen/Qwen3-8B", "b" * 40, None, "a" * 64, "c" * 64)
PROVENANCE = {
    "command": ["train/eagle.py", "recipe=mine/eagle3"],
    "rows": 1000,
    "packages": {"torch": "2.13.0"},
}
PARTS = [
    Licensed("target", "Qwen/Qwen3-8B", "apache-2.0"),
    Licensed("training data", "org/chats", None),
]


def build_card(card_contents: CardContents) -> ModelCard:
    return cards.build_model_card(card_contents, [("vLLM", "vllm serve Qwen/Qwen3-8B")])


def replace_target(card_contents: CardContents, **parts: Any) -> CardContents:
    return replace(
        card_contents, release=replace(card_contents.release, made_for=replace(TARGET, **parts))
    )


@pytest.fixture(scope="module")
def card_contents() -> CardContents:
    records = simulate(24)
    report = judge(
        load_gate("default"), Evidence(simulated_sweep(simulated_report(records), 8), records)
    )
    recipe = load_recipe(
        Recipe, ["recipe=pico/eagle3", "train.output_dir=runs/mine", "data.source=org/chats"]
    )
    history = History(4000.0, 500, [{"step": 500, "epoch": 2.5, "loss": 1.0}])
    release = Release(Path("runs/mine"), recipe, PROVENANCE, (), report, records, TARGET)
    return CardContents(
        "org/Qwen3-8B-eagle3", "v3", release, history, "Qwen/Qwen3-8B", PARTS, "apache-2.0"
    )


def replace_report(card_contents: CardContents, **parts: Any) -> CardContents:
    return replace(
        card_contents,
        release=replace(card_contents.release, report={**card_contents.release.report, **parts}),
    )


def test_the_metadata_have_the_base_model_and_the_results(card_contents: CardContents) -> None:
    data = ModelCard(str(build_card(card_contents))).data
    assert (data.base_model, data.base_model_relation) == ("Qwen/Qwen3-8B", "adapter")
    assert (data.library_name, data.license, data.datasets) == (
        "specdistill",
        "apache-2.0",
        ["org/chats"],
    )
    assert data.tags == ["speculative-decoding", "eagle3", "specdistill"]
    row = card_contents.release.report["results"][0]
    assert [(result.metric_type, result.metric_value) for result in data.eval_results] == [
        (name, row[name]) for name in ("mean_acceptance_length", "acceptance_rate", "speedup")
    ]


def test_the_text_has_the_facts_of_the_release(card_contents: CardContents) -> None:
    text = build_card(card_contents).text
    for fact in (
        *(
            "https://huggingface.co/Qwen/Qwen3-8B",
            "arXiv 2503.01840",
            "Release v3",
            "```bash\nvllm serve Qwen/Qwen3-8B\n```",
        ),
        *(
            "Temperatures: 0, 0.8, 1 ",
            "1, 2, 4, 8",
            "60 to 310",
            "128 tokens",
            "AMD EPYC 9B45",
            "[recipe.yaml](recipe.yaml)",
        ),
        *("1,000 packed rows of 256 tokens", "500 steps in 1 h 6 min"),
        *("| training data | org/chats | unknown |", f"| commit | {'b' * 40} |", f"`{'a' * 64}` |"),
    ):
        assert fact in text
    assert "TARGET" not in text


def test_the_card_names_the_engine_that_serves_a_lookup(card_contents: CardContents) -> None:
    """vLLM serves a lookup with the plugin; the commands of other engines start the draft alone."""
    lookup = {"method": "ngram", "min": 2, "max": 5, "draft_tokens": 2}
    settings = {**card_contents.release.report["settings"], "drafting": {"lookup_first": lookup}}
    text = str(build_card(replace_report(card_contents, settings=settings)))
    assert "2 to 5 tokens first" in text and "specdistill[vllm]" in text
    (engines,) = re.findall(r"The commands for (.*) start the draft alone", text)
    assert (
        "SGLang" in engines
        and "llama.cpp" in engines
        and "vLLM" not in engines.replace("served by vLLM", "")
    )


def test_the_card_leaves_out_results_that_are_missing(card_contents: CardContents) -> None:
    """A server's report without a baseline has no speedup; a resumed run has no total time."""
    row = {
        key: value
        for key, value in card_contents.release.report["results"][0].items()
        if not key.startswith("speedup")
    }
    row["not_measured"] = {**row["not_measured"], "speedup": "no baseline"}
    contents_without_speedup = replace_report(card_contents, results=[row])
    text = build_card(
        replace(contents_without_speedup, history=replace(card_contents.history, seconds=None))
    ).text
    assert "no baseline" in text and "500 steps" in text and "1 h 6 min" not in text
    assert [
        result.metric_type for result in build_card(contents_without_speedup).data.eval_results
    ] == [
        "mean_acceptance_length",
        "acceptance_rate",
    ]
    assert "Training: " not in build_card(replace(card_contents, history=None)).text


def test_nothing_from_outside_is_markup(card_contents: CardContents) -> None:
    pages = []
    for name in ("name", HOSTILE):
        bad = replace_report(card_contents, **renamed(card_contents.release.report, name))
        bad = replace(bad, since=name)
        bad = replace(
            bad,
            reason=name,
            overridden=[name],
            parts=[Licensed("training data", name, name)],
            license=name,
        )
        card = build_card(
            replace_target(bad, name_or_path=name, adapter=name, revision=name, weights=name)
        )
        pages.append(Page(card.text))
        assert card.data.license_name == name
    friendly, hostile = pages
    assert hostile.elements == friendly.elements and hostile.references == friendly.references


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({}, {"eval.suite": "pico"}),
        (
            {"temperature": 0.7, "top_p": 0.9, "num_speculative_tokens": 6},
            {"eval.temperature": "0.7", "eval.top_p": "0.9"},
        ),
        (
            {"tree": {"budget": 24, "depth": 4, "top_k": 4}},
            {"eval.tree": "{budget: 24, depth: 4, top_k: 4}"},
        ),
        (
            {"batch_size": 4, "max_new_tokens": 64},
            {"eval.batch_size": "4", "eval.max_new_tokens": "64"},
        ),
    ],
)
def test_the_command_on_the_card_repeats_the_measurement(
    card_contents: CardContents, settings: dict[str, Any], given: dict[str, str]
) -> None:
    """`specdistill eval` accepts every key, and derives the same settings from them."""
    suite = {**card_contents.release.report["suite"], "name": "pico"}
    changed = replace_report(
        card_contents,
        settings={**card_contents.release.report["settings"], **settings},
        suite=suite,
    )
    program, verb, *words = shlex.split(format_eval_command(changed).replace("\\\n", ""))
    assert (program, verb) == ("specdistill", "eval")
    assert {"method=eagle3", "target=Qwen/Qwen3-8B", "draft=org/Qwen3-8B-eagle3@v3"} <= set(words)
    assert {f"{key}={value}" for key, value in given.items()} <= set(words)
    script = load_script("eval/run.py")
    recipe = load_recipe(
        Recipe, ["train.output_dir=runs", *select_recipe_keys(words, script.SHORTHANDS)]
    )
    for name, value in settings.items():
        setting = getattr(recipe.eval, name)
        assert (setting if name != "tree" else setting.model_dump(exclude_none=True)) == value


def test_a_measurement_in_llama_cpp_names_its_files(card_contents: CardContents) -> None:
    engine = {"name": "llama.cpp", "version": "b1"}
    changed = replace_report(
        card_contents, engine=engine, target={"model": "pico", "dtype": "MOSTLY_Q4_1"}
    )
    files = {"eval.llama_cpp.model=TARGET.gguf", "eval.llama_cpp.model_draft=DRAFT.gguf"}
    words = shlex.split(format_eval_command(changed).replace("\\\n", ""))
    assert files <= set(words) and "MOSTLY" not in str(words)
    assert (
        "`DRAFT.gguf`: as llama.cpp's converter writes them, the target's in MOSTLY"
        in build_card(changed).text
    )


def test_a_private_suite_is_identified_by_its_hash(card_contents: CardContents) -> None:
    text = build_card(card_contents).text
    assert "eval.suite=SUITE" in text
    assert f"`{'0' * 64}`" in text


def test_a_target_in_a_folder_is_named_without_its_path(card_contents: CardContents) -> None:
    here = replace_target(
        replace(card_contents, base_model=None), name_or_path="/home/me/models/mine", revision=None
    )
    card = build_card(here)
    assert card.data.base_model is None and card.data.get("base_model_relation") is None
    assert (
        "/home/me" not in str(card)
        and "| name | mine |" in card.text
        and "target=TARGET" in card.text
    )
    pico = build_card(replace_target(here, name_or_path="pico")).text
    assert "import PICO" in pico and "target=pico" in pico
