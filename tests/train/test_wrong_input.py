"""Training refuses wrong input in one line that names the key, and leaves no folder behind."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specdistill.common.project import ROOT
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.serving.export import check_engines
from specdistill.targets.frozen import FrozenTarget
from tests.refusals import refused, refused_key
from tests.tiny import write_inputs, write_target
from tests.train.runs import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_inputs(path)
    return path


@pytest.mark.parametrize(
    ("method", "keys", "key"),
    [
        ("eagle3", "draft.vocab_size=5000", "draft.vocab_size"),
        ("eagle3", "draft.init=nowhere", "draft.init"),
        ("eagle3", "target.model=nowhere/at/all", "target.model"),
        ("eagle3", "target.dtype=bfloat16", "train.bf16"),
        ("eagle3", "eval.tree={budget: 2, depth: 3, top_k: 2}", "eval.tree.budget"),
        ("eagle3", "draft.sliding_window=2", "draft.ttt_steps"),
        ("eagle3", "draft.fc_bias=true", "draft.fc_bias"),
        ("eagle3", "draft={hidden_size: 48, train_head: false}", "draft.train_head"),
        ("eagle3", "train.num_train_epochs=0", "train.num_train_epochs"),
        ("eagle3", "train={num_train_epochs: 2, max_steps: 4}", "train.num_train_epochs"),
        ("eagle3", "train.metric_for_best_model=acceptance_9", "train.metric_for_best_model"),
        ("eagle3", "train.metric_for_best_model=aceptance_length", "train.metric_for_best_model"),
        ("eagle3", "train.report_to=wandb", "train.report_to"),
        ("eagle3", "data.cache_dir=pyproject.toml/cache", "data.cache_dir"),
        ("eagle3", "train.neftune_noise_alpha=5", "train.neftune_noise_alpha"),
        ("eagle3", "train.fp16=true", "train.fp16"),
        ("eagle3", "train.push_to_hub=true", "train.push_to_hub"),
        ("eagle3", "train.hub_token=hf_x", "train.hub_token"),
        ("eagle3", "train.resume_from_checkpoint=nowhere", "train.resume_from_checkpoint"),
        ("eagle3", "train.save_only_model=true", "train.save_only_model"),
        ("eagle3", "train.output_dir=pyproject.toml/run", "train.output_dir"),
        ("draft_model", "draft.init=pico", "draft.init"),
        ("draft_model", "draft.init=scratch draft.head_dim=7", "draft.head_dim"),
        ("draft_model", "train.use_liger_kernel=true", "train.use_liger_kernel"),
        ("draft_model", "train.deepspeed=zero3.json", "train.deepspeed"),
        ("draft_model", "draft.lora.rank=65", "draft.lora.rank"),
        ("mtp", "draft.num_layers=2", "draft.num_layers"),
        ("eagle3", "publish.exports=[vllm,gguf] draft.norm_output=true", "publish.exports[1]"),
        ("eagle3", "eval.engine=llama.cpp draft.num_layers=2", "eval.engine"),
        ("pard", "eval.engine=sglang", "eval.engine"),
        ("pard", "draft.mask_token_id=0", "draft.mask_token_id"),
        ("mtp", "publish.exports=[vllm]", "publish.exports"),
        ("mtp", "eval.engine=vllm", "eval.engine"),
        ("mtp", "draft.init=null", "draft.init"),
        ("mtp", "draft.intermediate_size=8", "draft.intermediate_size"),
        ("mtp", "draft.sliding_window=8", "draft.sliding_window"),
    ],
)
def test_wrong_input_is_refused_in_one_line_and_leaves_no_folder(
    folder: Path, tmp_path: Path, method: str, keys: str, key: str
) -> None:
    init_keys = ["draft.init=scratch"] if method == "mtp" else []
    ended = train(
        folder, tmp_path / "run", f"method={method}", *init_keys, *re.split(" (?=draft)", keys)
    )
    assert ended.returncode == 2
    assert refused_key(ended.stderr) == key
    assert not (tmp_path / "run").exists()


def test_a_check_of_engines_draws_no_random_number(
    tmp_path: Path,
) -> None:
    keys = [
        f"target.model={write_target(tmp_path)}",
        "data.source=x",
        "train.output_dir=runs/x",
        "draft.num_layers=2",
    ]
    lora: Any = load_recipe(
        Recipe, ["method=draft_model", *keys, "draft.lora.rank=4", "publish.exports=[vllm,gguf]"]
    )
    causal = [
        "draft.is_causal=true",
        "draft.aux_layers=[1,2,3]",
        "draft.mask_token_id=2",
        "publish.exports=[vllm,sglang]",
    ]
    target, state = FrozenTarget.load(str(tmp_path)), torch.get_rng_state()
    check_engines(lora, target)
    assert torch.equal(torch.get_rng_state(), state)
    blocks: Any = load_recipe(Recipe, ["method=dflash", *keys, *causal])
    with refused("publish.exports[1]", "sglang", holds="causal slots without a window"):
        check_engines(blocks, target)


@pytest.mark.parametrize(("keys", "key"), [([], "method"), (["data.source=pico"], "data.source")])
def test_a_script_refuses_a_method_that_needs_no_training(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    keys: list[str],
    key: str,
    folder: Path,
) -> None:
    base_keys = ["method=ngram", f"target.model={folder / 'model'}", "train.output_dir=runs/none"]
    monkeypatch.setattr(sys, "argv", ["train/draft.py", *base_keys, *keys])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "train" / "draft.py"), run_name="__main__")
    assert refused_key(capfd.readouterr().err) == key
