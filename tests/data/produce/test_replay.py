"""Conversations of agents generated again: each turn in its own recorded context, as transformers'
generate() continues it."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from specdistill.data.produce.generate import make_blocks
from specdistill.data.produce.job import Job
from specdistill.data.rows.row_set import RowTarget
from specdistill.recipe.sections import LocalRegeneration
from specdistill.targets.frozen import FrozenTarget
from tests.data.produce.row_sets import config_for

SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {}}}
TEMPLATE = (
    "{% if enable_thinking %}Think.{% endif %}{{ tools | length }}{% for m in messages %}{{"
    " m.role[0] }}:{{ m.content or '' }}{% for it in m.tool_calls or [] %}{{ it.function.name }}({{"
    " it.function.arguments | tojson }}){% endfor %}{% endfor %}{% if add_generation_prompt %}a:{%"
    " endif %}"
)


def make_conversation(number: int) -> dict[str, Any]:
    """Return a row of two exchanges, the first of which has a call and its result."""
    generator = random.Random(number)
    a, b = (generator.randint(10, 99) for _ in range(2))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a}}}
    turns = [
        {"role": "user", "content": f"{a}+{b}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": f"{a + b}."},
        {"role": "user", "content": "And?"},
    ]
    return {"messages": [{"role": "system", "content": "Hi"}, *turns], "tools": [SCHEMA]}


def take_prompt(row: dict[str, Any]) -> list[int]:
    """Return the tokens before those with loss, which are the last ones."""
    start = row["loss_mask"].index(1)
    assert all(row["loss_mask"][start:])
    return list(row["input_ids"][:start])


@pytest.mark.parametrize(
    ("count", "compared"),
    # long: 36 turns, each generated twice
    [(1, 12), pytest.param(12, 112, marks=pytest.mark.long)],
)
def test_every_turn_is_what_the_target_generates_from_its_recorded_prefix(
    count: int, compared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specdistill.data.produce.transformers_backend.choose_fast_dtype",
        lambda device: torch.float32,
    )
    target = FrozenTarget.load("pico")
    target.tokenizer.chat_template = TEMPLATE
    rows = [make_conversation(number) for number in range(count)]
    settings = LocalRegeneration(
        num_tokens=1000 * count, temperatures=[0.0], template={"enable_thinking": True}
    )
    config = config_for(tmp_path, rows, max_length=112, regenerate=settings)
    job = Job(
        config,
        RowTarget("pico", "0" * 64, target.tokenizer, tuple(target.eos_token_ids), target.model),
    )
    make_blocks(job)
    generated_rows = [
        row for path in sorted(job.blocks.glob("*.arrow")) for row in Dataset.from_file(str(path))
    ]
    replayed = set()
    for row in rows:
        for turn in (2, 4, 6):
            options: dict[str, Any] = {
                "tools": row["tools"],
                "add_generation_prompt": True,
                "enable_thinking": True,
            }
            ids = target.tokenizer.apply_chat_template(row["messages"][:turn], **options)[
                "input_ids"
            ]
            ((number, generated),) = (
                (number, generated_row)
                for number, generated_row in enumerate(generated_rows)
                if take_prompt(generated_row) == ids
            )
            replayed.add(number)
            num_new = min(compared, sum(generated["loss_mask"]))
            prompt, limits = (
                torch.tensor([ids]),
                {"max_new_tokens": num_new, "eos_token_id": sorted(target.eos_token_ids)},
            )
            expected = target.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                pad_token_id=0,
                **limits,
            )
            assert generated["input_ids"][: len(ids) + num_new] == expected[0].tolist()
    assert replayed == set(range(len(generated_rows)))
