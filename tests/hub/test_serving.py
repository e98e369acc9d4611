"""The engines and commands for a published draft, compared with the doctor's loaders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdistill.advice.doctor.diagnosis import examine_draft
from specdistill.hub.publish import can_load_directly, format_serving_lines
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import read_config
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.serving.engines import ENGINES, list_engines_with
from specdistill.serving.engines.engine import Served, Serving
from specdistill.serving.export import export
from specdistill.targets.frozen import FrozenTarget
from tests.heads import head_of, save_head
from tests.tiny import tiny_target_model, tiny_tokenizer

# Method -> shapes of its heads that engines treat differently.
SHAPES: dict[str, list[dict[str, Any]]] = {
    "eagle3": [
        {"draft_vocabulary": torch.arange(0, 200, 2)},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_residual": True},
        {"num_layers": 2},
        {"sliding_window": 16},
        {"aux_layers": (1, 2, 4)},
    ],
    "eagle": [{}, {"sliding_window": 16}],
}
CASES = [(method, shape) for method, shapes in SHAPES.items() for shape in shapes]


@pytest.fixture(scope="module")
def target(saved_models: dict[str, Path]) -> FrozenTarget:
    return FrozenTarget.load(str(saved_models["target"]))


@pytest.mark.parametrize(
    ("method", "shape"),
    CASES,
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_the_doctor_agrees_on_the_engines_that_load_a_draft(
    target: FrozenTarget, tmp_path: Path, method: str, shape: dict[str, Any]
) -> None:
    save_head(method, head_of(method, target, shape, torch.float32), tmp_path)
    for name in list_engines_with("serve_command"):
        if METHODS[method].serving().get(name, Serving()).loaders:
            assert (
                can_load_directly(ENGINES[name], method, tmp_path)
                == examine_draft(tmp_path, engine=name).is_sound
            ), name


def test_each_engine_has_its_command(tmp_path: Path) -> None:
    target = FrozenTarget(tiny_target_model(num_layers=8), tiny_tokenizer(), name="org/target")
    draft = tmp_path / "draft"
    save_head(
        "eagle3",
        head_of("eagle3", target, {"draft_vocabulary": torch.arange(0, 200, 2)}, torch.float32),
        draft,
    )
    config, revisions = read_config(draft, "draft"), {"revision": "abc", "draft_revision": "v2"}
    served = Served("eagle3", Path("org/draft"), "org/target", 4, False, config, **revisions)
    exports = {"gguf": export(draft, "gguf", tmp_path / "gguf")}
    lines = dict(format_serving_lines(served, draft, exports))
    assert lines["vLLM"].startswith("vllm serve org/target \\\n    --revision abc ")
    assert '"model": "org/draft", "revision": "v2"' in lines["vLLM"]
    assert (
        "--revision abc " in lines["SGLang"]
        and "--speculative-draft-model-path org/draft " in lines["SGLang"]
    )
    assert "--speculative-draft-model-revision v2" in lines["SGLang"]
    fetch, _, convert, _ = lines["llama.cpp"].splitlines()
    assert fetch == "hf download org/draft --revision v2 --local-dir draft --include 'gguf/*'"
    assert (
        'convert_hf_to_gguf.py draft/gguf --target-model-dir "$(hf download org/target --revision'
        ' abc)"' in convert
    )
    lookup = LookupFirstConfig(draft_tokens=2)
    lookup_lines = dict(format_serving_lines(replace(served, lookup_first=lookup), draft, exports))
    assert (
        lookup_lines["vLLM"].startswith("SPECDISTILL_LOOKUP_FIRST=")
        and '"num_speculative_tokens": 4' in lookup_lines["vLLM"]
    )
    assert (
        "--speculative-num-steps 2" in lookup_lines["SGLang"]
        and "--spec-draft-n-max 2" in lookup_lines["llama.cpp"]
    )
    assert lines.keys() == {"vLLM", "SGLang", "llama.cpp"} and str(tmp_path) not in str(lines)
