"""`specdistill data make` generates with a real vLLM.

Greedy answers are what transformers generates from the same contexts.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdistill.common.project import PICO
from specdistill.data.produce.blocks import Answer
from specdistill.data.produce.prompts import GenerationPrompt, GenerationTask
from specdistill.data.produce.server_backend import ServerTokenizer, ask
from specdistill.serving.engines.completions import CompletionServer
from tests.scripts import specdistill
from tests.with_engines.environments import serving

pytestmark = [pytest.mark.long, pytest.mark.engines]  # vLLM in its own environment

MODEL = str(PICO)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a vLLM with pico, whose generation_config.json has top_k 1 and a penalty.

    vLLM applies them wherever a request leaves them out.
    """
    folder = tmp_path_factory.mktemp("vllm")
    model = shutil.copytree(MODEL, folder / "model")
    # The stop tokens stay.
    generation_config = json.loads((model / "generation_config.json").read_text(encoding="utf-8"))
    config = generation_config | {"do_sample": True, "top_k": 1, "repetition_penalty": 1.5}
    (model / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    with serving(folder / "log", str(model), "--served-model-name", MODEL) as served:
        yield served


def test_vllm_generates_what_transformers_does(address: str, tmp_path: Path) -> None:
    """Conversations have two turns: each answer follows the one before it, and ends with its stop
    token."""
    conversations = [
        [f"What does `{name}` do?", "And in one line?"]
        for name in ("map", "zip", "sorted", "open", "len", "sum")
    ]
    turns = [
        [
            {"role": role, "content": content}
            for content in questions
            for role in ("user", "assistant")
        ]
        for questions in conversations
    ]
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"messages": messages}) for messages in turns), encoding="utf-8"
    )
    keys = [
        "recipe=pico/eagle3",
        f"data.source={tmp_path / 'rows.jsonl'}",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]
    keys += [
        "data.regenerate.num_tokens=100",
        "data.regenerate.temperatures=[0.0]",
        "data.regenerate.batch_size=1",
    ]
    keys += ["data.regenerate.filter=[]", "data.max_length=128", "data.validation_fraction=0.3"]
    done = specdistill("data", "make", *keys, f"data.regenerate.server=[{address}]")
    assert done.returncode == 0, done.stderr[-3000:]
    paths = tmp_path.glob("cache/rows/*.blocks/*.arrow")
    documents = [row for path in paths for row in Dataset.from_file(str(path))]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        AutoTokenizer.from_pretrained(MODEL),
    )
    assert documents
    for row in documents:
        mask = "".join(map(str, row["loss_mask"]))
        assert any(
            questions[0] in tokenizer.decode(row["input_ids"]) for questions in conversations
        )
        for answer in re.finditer("1+", mask):
            ids = torch.tensor([row["input_ids"][: answer.start()]])
            options = {"max_new_tokens": 128 - ids.shape[1], "do_sample": False, "pad_token_id": 0}
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
                0, ids.shape[1] :
            ].tolist()
            assert row["input_ids"][answer.start() : answer.end()] == expected


def test_requests_override_the_sampling_of_the_model(address: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = list(tokenizer("def read(path):\n")["input_ids"])
    server_tokenizer = ServerTokenizer(tokenizer, [tokenizer.eos_token_id], {})
    server = CompletionServer(address, 60.0)
    server.find_model([MODEL])

    def answer(temperature: float, seed: int) -> Answer:
        return ask(
            server,
            ids,
            GenerationTask("", GenerationPrompt(ids), temperature, seed, len(ids) + 24),
            server_tokenizer,
        )

    sampled = {tuple(answer(1.0, seed).token_ids) for seed in range(6)}
    greedy = answer(0.0, 0).token_ids
    body = {
        "model": server.model,
        "prompt": ids,
        "max_tokens": 24,
        "temperature": 1.0,
        "return_token_ids": True,
    }
    defaults = {tuple(server.complete({**body, "seed": seed}).token_ids) for seed in range(6)}  # type: ignore[union-attr, arg-type]
    assert len(defaults) == 1 and len(sampled) == 6
    prompt = torch.tensor([ids])
    options = {
        "max_new_tokens": 24,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(prompt),
    }
    reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    assert list(greedy) == reference.generate(prompt, **options)[0, len(ids) :].tolist()
