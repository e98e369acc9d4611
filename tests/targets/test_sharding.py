"""A target that two processes share computes what the whole target computes in each of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from specdistill.common.project import ROOT
from specdistill.targets import sharding
from tests.launches import TWO_PROCESSES, finish, start
from tests.refusals import refused
from tests.tiny import SMALL, input_keys, tiny_target_model, tiny_tokenizer, write_inputs

BYTES_OF_WHOLE = 4 + 2  # for each parameter: float32, beside the bfloat16 file that it is read from
# The most that one of two processes may hold while it loads its part, relative to BYTES_OF_WHOLE.
PEAK_SHARE = 0.65
HELD_SHARE = 0.55  # the most that it may hold of the parameters afterwards


def launch(configuration: str, script: Path, *arguments: str) -> None:
    """Run the script in two processes with a launch configuration that ships, in float32."""
    process = start(
        script, *arguments, config=configuration, options=(*TWO_PROCESSES, "--mixed_precision=no")
    )
    output = finish(process)
    assert process.returncode == 0, output[-8000:]


def run_two_processes(configuration: str, folder: Path) -> list[dict[str, Any]]:
    write_inputs(folder, hidden_size=128)
    launch(configuration, Path(__file__).with_name("in_two_processes.py"), str(folder))
    seen = [
        json.loads((folder / f"process-{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)
    ]
    for process in seen:
        # ZeRO-3 would have left it empty
        assert process["processes"] == 2 and process["embedding"] == [260, 128]
        shared = process["layers"]
        assert shared["difference"] == shared["head"] == shared["draft"] == 0.0, shared
        assert shared["is_same"] and shared["class"] == "LlamaForCausalLM"
        assert shared["num_parameters"] == tiny_target_model(hidden_size=128).num_parameters()
        assert process["device_map"].startswith("target.device_map: got auto with 2 processes")
    assert seen[0]["regenerate"].startswith("data.regenerate.num_tokens: got 64 with target.shard")
    assert seen[1]["regenerate"].startswith("another process of this launch has ended")
    return seen


@pytest.mark.long  # two launches
@pytest.mark.distributed
def test_a_draft_learns_the_same_from_a_target_that_is_shared(tmp_path: Path) -> None:
    drafts = []
    write_inputs(tmp_path)
    keys = [
        *input_keys(tmp_path),
        *SMALL,
        "data.regenerate=null",
        "train.per_device_train_batch_size=2",
        "train.bf16=false",
    ]
    for shard in ("none", "layers"):
        shard_keys = [f"target.shard={shard}", f"train.output_dir={tmp_path / shard}"]
        launch("ddp", ROOT / "train" / "eagle.py", "recipe=small/eagle3", *keys, *shard_keys)
        drafts.append(load_file(tmp_path / shard / "draft" / "model.safetensors"))
    assert drafts[0].keys() == drafts[1].keys()
    assert all(torch.equal(tensor, drafts[1][name]) for name, tensor in drafts[0].items())


@pytest.mark.long  # a launch, over 180 MB of weights
@pytest.mark.distributed
def test_each_process_loads_its_part_of_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without it glibc keeps the memory that a gathered layer has freed
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")
    sizes = {
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 42,
        "num_attention_heads": 8,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=4, **sizes)).to(
        torch.bfloat16
    )
    model.save_pretrained(tmp_path / "large", max_shard_size="60MB")  # 360 MB in float32
    tiny_tokenizer().save_pretrained(tmp_path / "large")
    for process in run_two_processes("ddp", tmp_path):
        assert process["held_share"] <= HELD_SHARE
        assert process["peak_bytes"] <= PEAK_SHARE * BYTES_OF_WHOLE * model.num_parameters(), (
            process
        )


@pytest.mark.long  # a launch
@pytest.mark.distributed
def test_zero_3_leaves_the_target_alone(tmp_path: Path) -> None:
    run_two_processes("zero3", tmp_path)


@pytest.mark.parametrize(
    ("joined", "quantized", "message"),
    [
        (False, False, "layers, which divides the target among a group of processes"),
        (True, True, "layers with a quantized checkpoint"),
    ],
)
def test_sharding_without_a_process_group_or_of_quantized_weights_is_refused(
    joined: bool, quantized: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding.distributed, "is_initialized", lambda: joined)
    with refused("target.shard", f"{message}"):
        sharding.shard_class(LlamaConfig(), is_quantized=quantized, trust_remote_code=False)
