"""make smollm2-engines finds the drafts to measure and writes its page.

tests/with_engines runs the programs that it starts.
"""

import json
from pathlib import Path

import pytest

from bench.smollm2_engines import Draft, export_gguf, format_page, load_compared_drafts
from specdistill.common.errors import UserError
from specdistill.methods.load import load_method
from specdistill.methods.target_record import save_draft
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.targets.frozen import FrozenTarget
from tests.heads import build_head
from tests.refusals import refused
from tests.tiny import write_target

MEASURED = {
    "draft": "`eagle3`, K = 3",
    "engine": "vLLM 1.0, bfloat16",
    "acceptance_length_vllm": 1.95,
    "acceptance_length_vllm_ci95": [1.9, 2.0],
    "here": 2.0,
    "tokens_per_second": 30.0,
    "baseline_tokens_per_second": 20.0,
    "speedup": 1.5,
    "speedup_ci95": [1.4, 1.6],
    "not_measured": {"draft_ms": "a server does not time its steps one by one"},
}


@pytest.fixture
def head(in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a head with the norms of EAGLE-3.1 and its target where `make smollm2` leaves them."""
    folder = in_empty_folder / "runs" / "smollm2"
    write_target(folder / "target", num_layers=8)
    target = FrozenTarget.load(str(folder / "target"))
    draft = build_head("eagle3", target, fc_norm=True, norm_output=True)
    save_draft(load_method("eagle3"), target, draft, folder / "eagle3" / "draft")
    return Path("runs/smollm2/eagle3/draft")


def test_drafts_and_their_k_are_read_from_the_comparison(head: Path) -> None:
    with refused("drafts"):
        load_compared_drafts()
    candidates = [
        {
            "name": name,
            "report": {"draft": {"model": model}, "settings": {"num_speculative_tokens": k}},
        }
        for name, model, k in (
            ("draft", str(head), 2),
            ("ngram", None, 4),
            ("ngram+draft", str(head), 4),
        )
    ]
    lookup = {"method": "ngram", "min": 2, "max": 5, "draft_tokens": 2}
    candidates[-1]["report"]["settings"]["drafting"] = {"lookup_first": lookup}
    Path("runs/smollm2/comparison.json").write_text(
        json.dumps({"candidates": candidates}), encoding="utf-8"
    )
    alone, behind = load_compared_drafts()
    assert (alone, behind) == (
        Draft(head, "eagle3", 2),
        Draft(head, "eagle3", 4, LookupFirstConfig(**lookup)),
    )
    assert (
        "2 behind n-gram lookup of 2 to 5" in behind.name
        and "of 3 to 3" in behind.of_llama_cpp.name
    )


def test_the_page_has_the_measurements_and_why_one_is_missing(head: Path) -> None:
    with pytest.raises(UserError, match="fc_norm") as error:
        export_gguf(Draft(head, "eagle3", 3), Path("exported"))
    assert error.value.key == "engine" and not Path("exported").exists()
    absent = {"draft": "`eagle3`, K = 3", "engine": "llama.cpp, Q4_1", "refused": str(error.value)}
    caption, table, why = format_page([MEASURED, absent], 24, 64)
    assert "24 prompts" in caption and "up to 64 tokens" in caption
    assert table.splitlines()[2:] == [
        (
            "| `eagle3`, K = 3 | vLLM 1.0, bfloat16 | 1.95 (1.90 to 2.00) | 2.00 | −2.5% | 20.0 |"
            " 30.0 | 1.50× (1.40 to 1.60) |"
        ),
        "| `eagle3`, K = 3 | llama.cpp, Q4_1 | – | – | – | – | – | – |",
    ]
    assert "llama.cpp, Q4_1: engine: got gguf" in why
