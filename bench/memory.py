"""What a training step of an EAGLE-3 head for Llama-3.1-8B needs, seven steps deep, computed without a device: a JSON line for each shape.

    python bench/memory.py                 # exits with 1 where a shape needs 5 % more than bench/results/memory.json says
    python bench/memory.py record=true     # replaces that file

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
from specdistill.methods.eagle3 import method as eagle3
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
TARGET = Described(NAME, "target.model", None, None, {"architectures": ["LlamaForCausalLM"]}, CONFIG, None)
SHAPES: list[dict[str, Any]] = [
    {"rows": rows, "length": length, "draft_vocab_size": vocabulary, "gradient_checkpointing": recomputed}
    for (rows, length), vocabulary, recomputed in itertools.product(((4, 2048), (1, 8192)), (32_000, 128_256), (False, True))
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
    grown = [line for found, recorded in zip(needs, load_record(), strict=True) for line in growth(found, recorded)]
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


def need(rows: int, length: int, draft_vocab_size: int, gradient_checkpointing: bool) -> dict[str, Any]:
    """A shape, and what its step needs."""
    draft = eagle3.planned(TARGET, None, {"vocab_size": draft_vocab_size})
    options: dict[str, Any] = {"rows": rows, "length": length}
    if gradient_checkpointing:
        options["prepare"] = methodcaller("activation_checkpointing_enable")
    account = training_step("eagle3", draft.build, {"ttt_steps": NUM_STEPS}, TARGET, **options)
    return {
        "target": NAME,
        "rows": rows,
        "length": length,
        "draft_vocab_size": draft_vocab_size,
        "gradient_checkpointing": gradient_checkpointing,
        "peak_gib": round(account.peak_bytes / 2**30, 2),
        "traffic_gb": round(account.traffic_bytes / 1e9, 1),
        "tflop": round(account.flops / 1e12, 1),
        "data_dependent_ops": account.data_dependent_ops,
    }


if __name__ == "__main__":
    sys.exit(run(main, Options))
