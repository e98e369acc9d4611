"""What a training step of an EAGLE-3 head for Llama-3.1-8B needs, seven steps deep, computed without a device: a JSON line for each shape.

    python bench/memory.py [record=true]    # writes bench/results/memory.json

`peak_gib` is what a step adds to what stands (weights, gradients, optimizer); specdistill/planning/accounting.py says what is counted.
A test computes the shapes again and fails where one needs 5 % more than the record.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from specdistill.command import run
from specdistill.methods.eagle3 import method as eagle3
from specdistill.methods.sizes import Described
from specdistill.planning.accounting import objective_for, training_step
from specdistill.recipe.fields import Section, option

RECORD = Path(__file__).with_name("results") / "memory.json"
NAME, NUM_STEPS = "meta-llama/Llama-3.1-8B-Instruct", 7
CONFIG = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip
SHAPES = [
    {"rows": rows, "length": length, "draft_vocab_size": vocabulary, "gradient_checkpointing": recomputed}
    for (rows, length), vocabulary, recomputed in itertools.product(((4, 2048), (1, 8192)), (32_000, 128_256), (False, True))
]


class Options(Section):
    record: bool = option(False, "replace bench/results/memory.json by what is computed")


def main(options: Options) -> None:
    needs = [print_line(shape) for shape in SHAPES]
    if options.record:
        RECORD.write_text(json.dumps(needs, indent=1) + "\n", encoding="utf-8")


def print_line(shape: dict[str, Any]) -> dict[str, Any]:
    need = {"target": NAME, **shape, **needed(**shape)}
    print(json.dumps(need), flush=True)
    return need


def needed(rows: int, length: int, draft_vocab_size: int, gradient_checkpointing: bool) -> dict[str, float]:
    target = Described(NAME, "target.model", None, None, {"architectures": ["LlamaForCausalLM"]}, CONFIG, None)
    draft = eagle3.planned(target, None, {"vocab_size": draft_vocab_size})
    objective = objective_for("eagle3", draft.build, NUM_STEPS)
    account = training_step(objective, target, rows=rows, length=length, gradient_checkpointing=gradient_checkpointing)
    return {
        "peak_gib": round(account.peak_bytes / 2**30, 2),
        "traffic_gb": round(account.traffic_bytes / 1e9, 1),
        "tflop": round(account.flops / 1e12, 1),
        "data_dependent_ops": account.data_dependent_ops,
    }


if __name__ == "__main__":
    sys.exit(run(main, Options))
