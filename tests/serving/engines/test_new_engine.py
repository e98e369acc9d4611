"""A new engine needs an `Engine`, a row of `ENGINES`, and a `Serving` in each of its methods.

Then `export` writes for it, and `doctor` checks drafts against it.
"""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdistill.cli.main import main
from specdistill.methods.chains.serving import SEVERAL_LAYERS
from specdistill.methods.eagle3.serving import SERVING, SETTINGS, SLOTS, build_head_config
from specdistill.recipe.load import load_recipe
from specdistill.recipe.sections import EvalConfig
from specdistill.serving.engines import ENGINES
from specdistill.serving.engines.engine import Engine, Layout, Served, Serving
from specdistill.serving.engines.loader import AUX_LAYERS, Loader, Slot
from tests.heads import head_of, save_head
from tests.refusals import refused, refused_key
from tests.serving.layouts import saved_target


def serve_command(served: Served) -> str:
    return (
        f"toy serve {shlex.quote(served.target_name)} --draft {shlex.quote(str(served.output))}"
        f" --tokens {served.num_tokens}"
    )


TOY = Engine(
    name="toy",
    title="Toy",
    versions="1.0",
    serve_command=serve_command,
    counters="Its log says what it accepts.",
    loader_version="1.0",
)
TOY_EAGLE3 = Serving(
    "eagle3",
    Layout(
        lambda export: build_head_config(export) | {"architectures": ["Toy"]}, (SEVERAL_LAYERS,)
    ),
    (
        Loader(
            architectures=frozenset({"Toy"}),
            slots=(
                *SLOTS,
                Slot("lm_head.weight", "W H"),
                Slot("embed_tokens.weight", "V H", source="shared"),
            ),
            unknown="silent",
            unset="refused",
            settings=SETTINGS,
            aux_layers={"": {AUX_LAYERS: 0}},
            renamed=(("midlayer.", "layers.0.", ""),),
        ),
    ),
)


def test_a_new_engine_exports_and_is_checked_by_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ENGINES, "toy", TOY)
    monkeypatch.setitem(SERVING, "toy", TOY_EAGLE3)
    target = saved_target(tmp_path / "target")
    for num_layers in (1, 2):
        save_head(
            "eagle3",
            head_of("eagle3", target, {"num_layers": num_layers}),
            tmp_path / str(num_layers),
        )
    keys = ["engine=toy", f"target={tmp_path / 'target'}"]

    assert main(["export", *keys, f"draft={tmp_path / '1'}", f"output_dir={tmp_path / 'out'}"]) == 0
    config: dict[str, Any] = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Toy"] and "midlayer." not in config
    served = (tmp_path / "out" / "SERVE.md").read_text()
    assert f"toy serve {tmp_path / 'target'} --draft {tmp_path / 'out'} --tokens 3" in served
    assert "Toy (1.0)" in served and TOY.counters in served

    assert main(["doctor", *keys, f"draft={tmp_path / 'out'}", "decode=false"]) == 0
    capsys.readouterr()
    assert main(["doctor", *keys, f"draft={tmp_path / '1'}", "decode=false"]) == 1
    printed = capsys.readouterr().out
    assert "Toy 1.0" in printed and "architectures LlamaForCausalLMEagle3" in printed
    assert (
        main(["export", *keys, f"draft={tmp_path / '2'}", f"output_dir={tmp_path / 'refused'}"])
        == 2
    )
    assert refused_key(capsys.readouterr().err) == "engine"


def test_a_new_engine_is_measured_only_if_it_has_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_engine_name() -> str:
        return load_recipe(EvalConfig, ["engine=toy"]).engine

    monkeypatch.setitem(ENGINES, "toy", TOY)
    with refused("engine", "'toy'"):
        load_engine_name()
    monkeypatch.setitem(ENGINES, "toy", replace(TOY, client=ENGINES["vllm"].client))
    assert load_engine_name() == "toy"
