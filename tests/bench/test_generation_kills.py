"""The bench that kills generations: what it finds of two kills each way, and that it notices rows that differ."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from specdistill.pico.corpus import CHAT_TEMPLATE
from tests.scripts import load_script
from tests.tiny import tiny_target_model, tiny_tokenizer

bench: Any = load_script("bench/generation_kills.py")


@pytest.mark.long  # generations that are killed and repeated
@pytest.mark.parametrize("way", ["in process", "by a server"])
def test_killed_generations_give_the_same_rows(way: str, tmp_path: Path) -> None:
    tiny_target_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer(CHAT_TEMPLATE).save_pretrained(tmp_path / "model")
    chats = [[{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "-"}] for number in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats), encoding="utf-8")
    keys = ["recipe=small/eagle3", f"target.model={tmp_path / 'model'}", f"data.source={tmp_path / 'rows.jsonl'}"]
    keys += ["target.dtype=float32", "train.bf16=false", "data.max_length=64", "data.decontaminate=[]"]
    keys += [f"data.regenerate.num_tokens={9000 if way == 'in process' else 1500}"]
    found = bench.trial(tmp_path / "runs", way, keys, 2, random.Random(3))
    assert (found["kills"], found["runs"], found["identical"]) == (2, 1, 1)
    assert found["repeated"] <= 2 * (1 if way == "in process" else 4) and found["needed"] > 20
    assert way in bench.page({"hardware": {"name": "a machine"}, "ways": {way: found}})


def test_rows_that_differ_are_other_rows(tmp_path: Path) -> None:
    made = []
    for token in (1, 2):
        Dataset.from_dict({"input_ids": [[token, 3]]}).save_to_disk(tmp_path / str(token))
        made.append(bench.rows(tmp_path / str(token)))
    assert len(made[0]) == 1 and made[0] != made[1]
