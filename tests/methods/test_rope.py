"""Both spellings of a rotary embedding are read as transformers reads each of them."""

import copy
import itertools
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig

from specdistill.methods.rope import find_contradiction, normalize, read_entries
from tests.draft_models import LLAMA3

SCALING = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DEFAULT = {"rope_type": "default"}
NEWER: list[dict[str, Any]] = [
    {**DEFAULT, "rope_theta": 10000.0},
    {**DEFAULT, "rope_theta": 5000.0},
    LLAMA3,
    {**LLAMA3, "factor": 16.0},
    {**YARN, "rope_theta": 10000.0},
    {**SCALING, "rope_theta": 5000.0},
]
OLDER: list[dict[str, Any]] = [
    {"rope_theta": 10000.0},
    {"rope_theta": 5000.0, "rope_scaling": None},
    {"rope_theta": 10000.0, "rope_scaling": SCALING},
    {"rope_theta": 5000, "rope_scaling": SCALING},
    {"rope_theta": 10000.0, "rope_scaling": {**SCALING, "factor": 16}},
    {"rope_theta": 10000.0, "rope_scaling": {**YARN, "type": "yarn"}},
    {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_scaling": {**SCALING, "rope_theta": 5000.0}},
]


def read_by_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters that transformers reads from a copy of a config.json."""
    rope = LlamaConfig(max_position_embeddings=256, **copy.deepcopy(config)).rope_parameters
    return normalize(rope, {"max_position_embeddings": 256})


@pytest.mark.parametrize(("newer", "older"), list(itertools.product(NEWER, OLDER)))
def test_spellings_contradict_each_other_where_readers_differ(
    newer: dict[str, Any], older: dict[str, Any]
) -> None:
    """One reader knows only the newer spelling, the other only the older one."""
    config = {"max_position_embeddings": 256, "rope_parameters": newer, **older}
    agree = read_by_transformers({"rope_parameters": newer}) == read_by_transformers(older)
    assert (find_contradiction(config) is None) == agree


@pytest.mark.parametrize("config", [*({"rope_parameters": newer} for newer in NEWER), *OLDER])
def test_one_spelling_is_read_as_transformers_reads_it(config: dict[str, Any]) -> None:
    config = {"max_position_embeddings": 256, **config}
    assert find_contradiction(config) is None
    assert read_entries(config) == [
        read_by_transformers({name: value for name, value in config.items() if "rope" in name})
    ]


def test_the_entry_that_transformers_takes_of_two_is_read() -> None:
    config = {"rope_parameters": NEWER[0], "rope_theta": 5000.0, "rope_scaling": SCALING}
    assert read_entries({"max_position_embeddings": 256, **config}) == [
        read_by_transformers(config)
    ]


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (
            {"rope_scaling": {**SCALING, "type": "yarn"}, "rope_theta": 1e4},
            "rope_scaling.rope_type llama3 and rope_scaling.type yarn",
        ),
        (
            {"rope_scaling": {**SCALING, "rope_theta": 500.0}, "rope_theta": 1e4},
            "rope_scaling.rope_theta 500.0 and rope_theta",
        ),
        # transformers then takes the default base of its class.
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}, "rope_scaling": SCALING},
            "rope_theta 500.0 in rope_parameters",
        ),
    ],
)
def test_one_entry_may_contradict_itself(config: dict[str, Any], what: str) -> None:
    contradiction = find_contradiction(config)
    assert contradiction is not None and what in contradiction


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "su", "rope_type": "longrope", "short_factor": [1.0]},
        {"type": "mrope", "rope_type": "default"},
    ],
)
def test_two_names_of_one_kind_agree(scaling: dict[str, Any]) -> None:
    assert find_contradiction({"rope_scaling": scaling, "rope_theta": 1e4}) is None


def test_each_kind_of_layer_has_an_entry() -> None:
    """The older keys are those of full attention, as Gemma 3's files have them."""
    older = {
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 1e4,
    }
    config = {"rope_parameters": Gemma3TextConfig(**copy.deepcopy(older)).rope_parameters}
    kinds = [entry["rope_type"] for entry in read_entries(config)]
    assert sorted(kinds) == ["default", "linear"]
    assert find_contradiction(config) is None and find_contradiction({**config, **older}) is None
    contradiction = find_contradiction(
        {**config, **older, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    )
    assert (
        contradiction is not None
        and "factor 8.0 in rope_parameters.full_attention" in contradiction
    )
