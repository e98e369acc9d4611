"""What a training step of a draft for Llama-3.1-8B needs, computed without a device: a JSON line for each shape.

    python bench/memory.py                 # exits with 1 where a shape needs 5 % more than bench/results/memory.json says
    python bench/memory.py record=true     # replaces that file

Drafts are an EAGLE-3 head, seven steps deep, and a DFlash drafter of five layers, 128 blocks of 16 for each row.
`peak_gib` is what a step adds to what stands (weights, gradients, optimizer); specdistill/planning/accounting.py says what is counted.
"""

import itertools
import json
import sys
from operator import methodcaller
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from specdistill.command import run
from specdistill.errors import ExitCode
from specdistill.methods import METHODS
from specdistill.methods.sizes import Described
from specdistill.planning.accounting import training_step
from specdistill.recipe.fields import Section, option

RECORD = Path(__file__).with_name("results") / "memory.json"
ALLOWED = 1.05  # of what is recorded
NAME, NUM_STEPS = "meta-llama/Llama-3.1-8B-Instruct", 7
CONFIG = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=131072, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip
TARGET = Described(
    NAME, "target.model", None, None, {"architectures": ["LlamaForCausalLM"]}, CONFIG, None
)
DRAFTS: dict[str, dict[str, Any]] = {  # keys of `draft:`
    "eagle3": {"ttt_steps": NUM_STEPS},
    "dflash": {"block_size": 16, "num_anchors": 128, "num_layers": 5},
}
LAYOUTS = (("eagle3", 4, 2048), ("eagle3", 1, 8192), ("dflash", 4, 2048))
SHAPES: list[dict[str, Any]] = [
    {
        "method": method,
        "rows": rows,
        "length": length,
        "draft_vocab_size": vocabulary,
        "gradient_checkpointing": recomputed,
    }
    for (method, rows, length), vocabulary, recomputed in itertools.product(
        LAYOUTS, (32_000, 128_256), (False, True)
    )
]


class Options(Section):
    record: bool = option(False, "replace bench/results/memory.json by what is computed")


def main(options: Options) -> ExitCode:
    needs = []
    for shape in SHAPES:
        needs.append(need(**shape))
        print(json.dumps(needs[-1]), flush=True)
    if options.record:
        RECORD.write_text(json.dumps(needs, indent=1) + "\n", encoding="utf-8")
    grown = [
        line
        for found, recorded in zip(needs, load_record(), strict=True)
        for line in growth(found, recorded)
    ]
    print(*grown, sep="\n", file=sys.stderr, end="\n" * bool(grown))
    return ExitCode.CHECK_FAILED if grown else ExitCode.DONE


def load_record() -> list[dict[str, Any]]:
    needs: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return needs


def growth(found: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """What a shape needs more of than its record allows, a line each."""
    shape = ", ".join(f"{key} {recorded[key]}" for key in SHAPES[0])
    return [
        f"{shape}: {key} {found[key]}, recorded {recorded[key]}"
        for key in recorded.keys() - SHAPES[0].keys() - {"target"}
        if found[key] > ALLOWED * recorded[key]
    ]


def need(
    method: str, rows: int, length: int, draft_vocab_size: int, gradient_checkpointing: bool
) -> dict[str, Any]:
    """A shape, and what its step needs."""
    draft = (
        METHODS[method]
        .implementation()
        .planned(TARGET, None, {**DRAFTS[method], "vocab_size": draft_vocab_size})
    )
    assert draft.build is not None
    options: dict[str, Any] = {"rows": rows, "length": length}
    if gradient_checkpointing:
        options["prepare"] = methodcaller("activation_checkpointing_enable")
    ledger = training_step(method, draft.build, DRAFTS[method], TARGET, **options)
    return {
        "target": NAME,
        "method": method,
        "rows": rows,
        "length": length,
        "draft_vocab_size": draft_vocab_size,
        "gradient_checkpointing": gradient_checkpointing,
        "peak_gib": round(ledger.peak / 2**30, 2),
        "traffic_gb": round(ledger.traffic / 1e9, 1),
        "tflop": round(ledger.flops / 1e12, 1),
    }


if __name__ == "__main__":
    sys.exit(run(main, Options))
