"""A plan, docs/targets.md and training agree on the methods that a target can have."""

from pathlib import Path

import pytest
import torch

from specdistill.advice.plan.plan import make_plan
from specdistill.advice.plan.reading import read_model_config
from specdistill.common.documents import read_json
from specdistill.common.errors import UserError
from specdistill.common.project import RECIPES
from specdistill.decoding.near_ties import compute_logits_in_float64
from specdistill.targets.anatomy import find_auto_class
from specdistill.targets.frozen import FrozenTarget
from tests.families import family_of
from tests.families import tiny_config as tiny_published_config
from tests.targets.architectures import (
    KINDS,
    REFUSED,
    SERVED,
    TRAINED,
    accepted,
    described,
    read_page,
    tiny_config,
    tiny_model,
)
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of some of two hundred classes
# One class for each kind of answer. The others are long tests: there are two hundred of them.
QUICK = (
    "llama",
    "gemma3",
    "gemma3_text",
    "qwen3_next",
    "qwen3_5_moe",
    "solar_open",
    "gpt2",
    "emu3",
    "bert",
)
PAGE = {row.cells[0]: row for row in read_page()}
PUBLISHED = sorted(path.parent.name for path in RECIPES.glob("*/config.json"))


def list_offered_methods(folder: Path) -> list[str]:
    """Return the trained methods that a plan offers for the target in a folder."""
    plan = make_plan(read_model_config(str(folder), key="target.model"))
    return [row.method for row in plan.methods if row.available and row.method in TRAINED]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind not in QUICK)) for kind in KINDS]
)
def test_plan_page_and_training_agree_on_a_class(kind: str, tmp_path: Path) -> None:
    row = PAGE[kind]
    if row.part not in (SERVED, REFUSED):
        pytest.skip(f"no tiny {kind} can be made, as the page says")
    config = tiny_config(kind)
    model = tiny_model(kind)
    if config.is_encoder_decoder:  # this model is the decoder alone, and is saved as such
        config = model.config
    config.save_pretrained(tmp_path)
    if row.part == SERVED:
        methods = accepted(FrozenTarget(model, tiny_tokenizer(), name=kind))
        assert described(methods) == row.cells[3]
        assert list_offered_methods(tmp_path) == methods
        return
    with pytest.raises(UserError):
        compute_logits_in_float64(FrozenTarget(model, tiny_tokenizer(), name=kind), [3, 4, 5], 3)
    try:
        methods = list_offered_methods(tmp_path)
    except UserError:  # the target is refused
        methods = []
    assert methods == []


@pytest.mark.long  # the plan of a model of published size takes seconds
@pytest.mark.usefixtures("no_shipped_recipe")
@pytest.mark.parametrize("name", PUBLISHED)
def test_plan_and_training_agree_on_a_published_target(name: str) -> None:
    """The plan reads the config as it was published; training gets a tiny model of the same class
    and kinds of layers.

    A shipped recipe may start its draft from another model. Then a draft exists for a target that
    none can be created from, so the plan gets no shipped recipe here.
    """
    tokenizer = family_of(name).tokenizer()
    config = tiny_published_config(
        read_json(RECIPES / name / "config.json"), tokenizer, num_layers=4
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = find_auto_class(config).from_config(config).eval()
    assert list_offered_methods(RECIPES / name) == accepted(
        FrozenTarget(model, tokenizer, name=name)
    )
