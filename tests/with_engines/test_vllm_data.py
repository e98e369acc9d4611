"""`specdistill data generate` from a real vLLM: greedy answers are what transformers generates from the same contexts."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdistill.data.answers import PATTERN, Question
from specdistill.data.completion_server import CompletionServer
from specdistill.data.served import Tokenizer, ask
from specdistill.project import PICO
from tests.scripts import specdistill
from tests.with_engines.environments import serving

pytestmark = [pytest.mark.long, pytest.mark.engines]  # vLLM in its own environment

MODEL = str(PICO)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of vLLM with pico, whose generation_config.json says top_k 1 and a penalty: vLLM applies them wherever a request leaves them out."""
    folder = tmp_path_factory.mktemp("vllm")
    model = shutil.copytree(MODEL, folder / "model")
    (model / "generation_config.json").write_text(
        '{"do_sample": true, "top_k": 1, "repetition_penalty": 1.5}', encoding="utf-8"
    )
    with serving(folder / "log", str(model), "--served-model-name", MODEL) as served:
        yield served


def test_vllm_generates_what_transformers_does(address: str, tmp_path: Path) -> None:
    """Conversations of two turns: each is answered after the one before it, and ends with the token that ended it."""
    asked = [[f"What does `{name}` do?", "And in one line?"] for name in ("map", "zip", "sorted", "open", "len", "sum")]
    turns = [[{"role": role, "content": said} for said in both for role in ("user", "assistant")] for both in asked]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in turns), encoding="utf-8")
    keys = ["recipe=pico/eagle3", f"data.source={tmp_path / 'rows.jsonl'}", f"data.cache_dir={tmp_path / 'cache'}"]
    keys += ["data.regenerate.num_tokens=100", "data.regenerate.temperatures=[0.0]", "data.regenerate.batch_size=1"]
    keys += ["data.regenerate.set_aside=[]", "data.max_length=128", "data.validation_fraction=0.3"]
    done = specdistill("data", "generate", *keys, f"data.regenerate.server=[{address}]")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [
        line for path in tmp_path.glob(f"cache/answers/*/{PATTERN}") for line in path.read_text(encoding="utf-8").splitlines()
    ]
    answers = [json.loads(line) for line in lines]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), AutoTokenizer.from_pretrained(MODEL)
    assert answers
    for answer in answers:
        ids = torch.tensor([answer["prompt_ids"]])
        options = {"max_new_tokens": 128 - ids.shape[1], "do_sample": False, "pad_token_id": 0}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()
        assert answer["token_ids"] == expected
        if answer["turn"] == 0:
            first = tokenizer.decode(answer["prompt_ids"])
            assert any(both[0] in first for both in asked)


def test_a_model_s_own_sampling_is_not_what_is_asked_for(address: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tuple(tokenizer("def read(path):\n")["input_ids"])
    told = Tokenizer(tokenizer, [tokenizer.eos_token_id], {})
    server = CompletionServer(address, 60.0)
    server.find_model([MODEL])
    sampled = {ask(server, ids, Question("", 0, 1.0, seed), told, 24).token_ids for seed in range(6)}
    greedy = ask(server, ids, Question("", 0, 0.0, 0), told, 24).token_ids
    left_out = {"model": server.model, "prompt": list(ids), "max_tokens": 24, "temperature": 1.0, "return_token_ids": True}
    theirs = {tuple(server.complete({**left_out, "seed": seed})["choices"][0]["token_ids"]) for seed in range(6)}  # type: ignore[index]
    assert len(theirs) == 1 and len(sampled) == 6
    prompt = torch.tensor([ids])
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    assert list(greedy) == reference.generate(prompt, **options)[0, len(ids) :].tolist()
