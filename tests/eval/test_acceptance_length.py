"""The acceptance length of a whole measurement is its tokens emitted in rounds over its rounds.

A model that drafts for itself accepts every token. A greedy answer of n tokens, as transformers'
`generate()` gives it, then takes ceil((n - 1) / (K + 1)) rounds, since its first token comes from
the prefill. That tells the true acceptance length without our decoder.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdistill.common.errors import ExitCode
from specdistill.evaluation.report.files import read_report
from specdistill.evaluation.statistics.records import PromptRecord
from tests.scripts import evaluate
from tests.tiny import save_adapter, tiny_target_model, tiny_tokenizer

PROMPTS = [
    f"{word} {word} {number} {word} " for number, word in enumerate(("ab", "cab", "dada", "e f"))
]
K = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two targets, one of which ends its answers early, a suite and a gate."""
    folder = tmp_path_factory.mktemp("acceptance")
    for name, stop_ids in (("target", []), ("stopping", [*range(0, 260, 12)])):
        model = tiny_target_model(num_layers=2)
        model.generation_config.eos_token_id = stop_ids
        model.generation_config.pad_token_id = 0
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    save_adapter(folder / "adapter", str(folder / "target"), num_layers=2)
    rows = [{"id": f"p{number}", "prompt": prompt} for number, prompt in enumerate(PROMPTS)]
    (folder / "suite.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "gate.yaml").write_text("- {metric: lossless.unexplained_divergences, max: 99}\n")
    return folder


def measure(
    folder: Path, output: Path, target: str, *keys: str
) -> tuple[dict[str, Any], list[PromptRecord]]:
    quick = (
        "eval.repeats=1",
        "eval.warmup=0",
        "eval.sampling_draws=0",
        f"gate={folder / 'gate.yaml'}",
    )
    arguments = (
        f"target={folder / target}",
        f"suite={folder / 'suite.jsonl'}",
        f"output_dir={output}",
        *quick,
        *keys,
    )
    assert evaluate(*arguments) == ExitCode.DONE
    return read_report(output)


def count_answer_tokens(model: Any, max_new_tokens: int) -> list[int]:
    """Return how many tokens transformers generates for each prompt."""
    lengths = []
    for prompt in PROMPTS:
        ids = tiny_tokenizer()(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            answer = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)
        lengths.append(answer.shape[1] - ids.shape[1])
    return lengths


def check_counts(report: dict[str, Any], records: list[PromptRecord]) -> None:
    """Check that the report counts each emitted token once: per prompt, and in its first row."""
    for record in records:
        num_emitted = sum(len(entry.emitted) for entry in record.rounds)
        assert 1 + num_emitted == record.speculative.num_tokens == len(record.token_ids)
    rounds = [entry for record in records for entry in record.rounds]
    row = report["results"][0]
    assert row["num_rounds"] == len(rounds)
    assert row["num_new_tokens"] == len(records) + sum(len(entry.emitted) for entry in rounds)
    assert row["mean_acceptance_length"] == pytest.approx(
        sum(len(entry.emitted) for entry in rounds) / len(rounds)
    )
    assert sum(row["emitted_per_position"]) == sum(len(entry.emitted) for entry in rounds)


@pytest.mark.parametrize(
    ("target", "max_new_tokens", "keys"),
    [
        ("target", 3, ()),
        ("target", 5, ()),
        ("target", 32, ()),
        ("stopping", 32, ()),
        ("target", 5, ("eval.batch_size=4",)),
        ("stopping", 32, ("eval.batch_size=4",)),
        ("target", 5, ("eval.tree={branching: [2, 1, 1, 1, 1, 1, 1, 1]}",)),
    ],
)
def test_a_model_that_drafts_for_itself_has_every_token_accepted(
    target: str, max_new_tokens: int, keys: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    draft = ("method=draft_model", f"draft={folder / target}", f"eval.num_speculative_tokens={K}")
    report, records = measure(
        folder, tmp_path / "report", target, *draft, f"eval.max_new_tokens={max_new_tokens}", *keys
    )
    check_counts(report, records)
    lengths = count_answer_tokens(
        AutoModelForCausalLM.from_pretrained(folder / target), max_new_tokens
    )
    assert [len(record.token_ids) for record in records] == lengths
    num_rounds = sum(math.ceil((length - 1) / (K + 1)) for length in lengths)
    row = report["results"][0]
    assert row["mean_acceptance_length"] == pytest.approx(
        sum(length - 1 for length in lengths) / num_rounds
    )
    # Every position that could be emitted was accepted; nothing is known of the others.
    longest = max(lengths) - 1
    assert row["acceptance_rate_per_position"] == [1.0] * min(longest, K) + [None] * (
        K - min(longest, K)
    )


@pytest.mark.parametrize(
    ("target", "keys"),
    [
        ("stopping", ("method=ngram",)),
        ("stopping", ("method=suffix",)),
        ("stopping", ("method=draft_model", "draft={draft}", "eval.temperature=1")),
        (
            "stopping",
            (
                "method=draft_model",
                "draft={draft}",
                "eval.lookup_first={{method: ngram, min: 1, draft_tokens: 3}}",
            ),
        ),
        (
            "stopping",
            (
                "method=draft_model",
                "draft={draft}",
                "eval.tree={{budget: 6, depth: 3, top_k: 2}}",
                "eval.batch_size=4",
            ),
        ),
        ("target", ("method=ngram", "target.adapter={adapter}", "eval.max_new_tokens=7")),
    ],
)
def test_every_token_is_counted_once(
    target: str, keys: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    """Nothing, a short draft, a tree, or tokens that differ from the target's are drafted.

    The prediction is of the same rounds.
    """
    keys = tuple(key.format(draft=folder / "target", adapter=folder / "adapter") for key in keys)
    report, records = measure(folder, tmp_path / "report", target, "eval.max_new_tokens=40", *keys)
    check_counts(report, records)
    row, theory = report["results"][0], report["theory"]
    assert theory["curve"][-1]["k"] == theory["K"] == row["num_speculative_tokens"]
    assert theory["curve"][-1]["mean_acceptance_length"] == pytest.approx(
        row["mean_acceptance_length"]
    )
    assert theory["curve"][-1]["predicted_speedup"] == pytest.approx(row["predicted_speedup"])
    assert theory["predicted"] == pytest.approx(theory["curve"][-1]["predicted_speedup"])
