"""Layers compiled one by one give the same features, with one graph for each kind of layer.

The model classes are those of the targets whose recipes set `torch_compile`.
"""

from types import SimpleNamespace

import pytest
import torch
import yaml
from torch._dynamo.utils import counters
from transformers import AutoConfig

from specdistill.common.project import ROOT
from specdistill.targets.frozen import build_tiny_target, compile_layers

RECIPES = [
    path for path in (ROOT / "recipes").glob("*/*.yaml") if (path.parent / "config.json").is_file()
]
COMPILED = sorted(
    {
        path.parent.name
        for path in RECIPES
        if yaml.safe_load(path.read_text())["train"].get("torch_compile")
    }
)


@pytest.mark.long  # a model of each class
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_give_the_same_features_for_packed_rows(name: str) -> None:
    target = build_tiny_target(AutoConfig.from_pretrained(ROOT / "recipes" / name), name)
    assert target is not None
    ids = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.cat((torch.arange(10), torch.arange(14))).expand(2, -1)
    aux = [0, len(target.layers) // 2, len(target.layers)]
    with torch.no_grad():
        plain = target.features(ids, aux, position_ids_BT=positions)
        counters.clear()
        compile_layers(
            {"torch_compile": True, "torch_compile_backend": "aot_eager"},
            target,
            SimpleNamespace(layers=(), compute_row_losses=len),
        )
        compiled = target.features(ids, aux, position_ids_BT=positions)
    kinds = len(set(getattr(target.config, "layer_types", None) or [""]))
    assert counters["stats"]["unique_graphs"] == kinds and not counters["graph_break"], dict(
        counters["graph_break"]
    )
    for plain_tensor, compiled_tensor in zip(
        (*plain.aux, plain.last_hidden), (*compiled.aux, compiled.last_hidden), strict=True
    ):
        assert torch.allclose(plain_tensor, compiled_tensor, atol=1e-5)
