"""The plugin for vLLM, without vLLM: what it refuses, and which tokens it drafts for each row.

tests/with_engines runs it in a real vLLM.
"""

import json
import tomllib
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdistill.common.project import ROOT
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.serving import vllm_plugin
from specdistill.serving.engines.vllm import LOOKUP_VARIABLE
from specdistill.serving.vllm_plugin import (
    check_version,
    check_vllm,
    read_parameters,
    register,
    wrap_propose,
)
from tests.refusals import refused

GROUP = "vllm.general_plugins"
CONFIG = LookupFirstConfig(min=2, max=3, draft_tokens=2)


def test_vllm_finds_the_plugin_which_does_nothing_unless_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plugin that is asked for imports vLLM, which is not installed here."""
    (entry,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        GROUP
    ].items()
    assert EntryPoint(*entry, GROUP).load() is register
    monkeypatch.delenv(LOOKUP_VARIABLE, raising=False)
    vllm_plugin.register.__wrapped__()
    monkeypatch.setenv(LOOKUP_VARIABLE, "{}")
    with pytest.raises(ImportError, match="vllm"):
        vllm_plugin.register.__wrapped__()


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("{", ""),
        ("[2]", ""),
        ('{"most": 3}', ""),
        ('{"min": 0}', ""),
        ('{"min": 4, "max": 3}', ""),
        ('{"draft_tree": {"branching": [2]}}', ".draft_tree"),
        ('{"method": "suffix"}', ".method"),
    ],
)
def test_malformed_parameters_are_refused(given: str, key: str) -> None:
    with refused(f"{LOOKUP_VARIABLE}{key}", ""):
        read_parameters(given)
    assert read_parameters(json.dumps(CONFIG.described)) == CONFIG


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.32.0", "0.3", "dev"])
def test_an_unknown_vllm_version_is_refused(version: str) -> None:
    for known in ("0.32.0", "0.33.1.dev3+cu130"):
        check_version(known)
    with refused(LOOKUP_VARIABLE, f"vLLM {version}"):
        check_version(version)


def make_vllm_config(**draft: Any) -> SimpleNamespace:
    plain = {
        "method": "eagle3",
        "parallel_drafting": False,
        "draft_sample_method": "greedy",
        "num_speculative_tokens": 4,
    }
    speculative = SimpleNamespace(**{**plain, "disable_padded_drafter_batch": False, **draft})
    scheduler, parallel = (
        SimpleNamespace(async_scheduling=False),
        SimpleNamespace(data_parallel_size=1),
    )
    return SimpleNamespace(
        speculative_config=speculative,
        scheduler_config=scheduler,
        parallel_config=parallel,
        use_v2_model_runner=False,
    )


@pytest.mark.parametrize(
    ("draft", "got"),
    [
        ({"method": "dflash"}, "method dflash"),
        ({"parallel_drafting": True}, "method eagle3"),
        ({"draft_sample_method": "probabilistic"}, "draft_sample_method probabilistic"),
        ({"disable_padded_drafter_batch": True}, "disable_padded_drafter_batch"),
        ({"num_speculative_tokens": 1}, "draft_tokens 2 with num_speculative_tokens 1"),
    ],
)
def test_unsupported_draft_settings_are_refused(draft: dict[str, Any], got: str) -> None:
    check_vllm(make_vllm_config(), CONFIG)
    with refused(LOOKUP_VARIABLE, got):
        check_vllm(make_vllm_config(**draft), CONFIG)


@pytest.mark.parametrize(
    ("section", "name", "value", "got"),
    [
        ("", "speculative_config", None, "vLLM without a draft"),
        ("", "use_v2_model_runner", True, "vLLM's model runner V2"),
        ("scheduler_config", "async_scheduling", True, "asynchronous scheduling"),
        ("parallel_config", "data_parallel_size", 2, "data parallelism"),
    ],
)
def test_a_vllm_without_a_draft_or_with_an_unsupported_engine_setting_is_refused(
    section: str, name: str, value: Any, got: str
) -> None:
    config = make_vllm_config()
    setattr(getattr(config, section) if section else config, name, value)
    with refused(LOOKUP_VARIABLE, got):
        check_vllm(config, CONFIG)


class Runner:
    """The parts of vLLM's model runner that the plugin reads.

    texts: The tokens of each request before a round.
    """

    def __init__(self, texts: dict[str, list[int]], unread: tuple[str, ...] = ()) -> None:
        self.requests = {name: SimpleNamespace() for name in texts}
        rows, self.asked = np.zeros((len(texts), 64), dtype=np.int32), 0
        for row, text in zip(rows, texts.values(), strict=True):
            row[: len(text)] = text
        lengths = np.array([len(text) for text in texts.values()])
        self.input_batch = SimpleNamespace(
            req_ids=list(texts), token_ids_cpu=rows, num_tokens_no_spec=lengths, vocab_size=100
        )
        self.discard_request_mask = SimpleNamespace(np=np.array([name in unread for name in texts]))

    def propose(self, scheduler_output: Any, sampled: torch.Tensor) -> torch.Tensor:
        self.asked = scheduler_output.num_spec_tokens_to_schedule
        return torch.tensor([[90 + row] * self.asked for row in range(len(sampled))])

    def commit(self, tokens: list[list[int]]) -> None:
        """Append the tokens of a round to the requests, as vLLM's bookkeeping does."""
        for row, (new, length) in enumerate(
            zip(tokens, self.input_batch.num_tokens_no_spec.copy(), strict=True)
        ):
            self.input_batch.token_ids_cpu[row, length : length + len(new)] = new
            self.input_batch.num_tokens_no_spec[row] = length + len(new)


def test_each_row_gets_lookup_tokens_or_else_draft_tokens() -> None:
    first, plain, unread = [1, 2, 3, 4, 5, 6, 1, 2], [7, 8, 9], [1, 2, 3, 1, 2]
    runner = Runner({"a": first, "b": plain, "c": unread}, unread=("c",))
    propose_with_lookup, round_ = (
        wrap_propose(Runner.propose, CONFIG),
        SimpleNamespace(num_spec_tokens_to_schedule=4),
    )
    assert propose_with_lookup(runner, round_, torch.tensor([[3, -1], [8, -1], [3, -1]])) == [
        [4, 5, 6, 1],
        [91, 91],
        [92, 92],
    ]
    assert (runner.asked, round_.num_spec_tokens_to_schedule) == (2, 4)
    runner.commit([[3], [8], []])
    _, index = runner.requests["a"].specdistill
    # The first row has one new token, and its padding is ignored. The second row has two and now
    # repeats itself, so the lookup continues the repetition.
    assert propose_with_lookup(runner, round_, torch.tensor([[4, 100], [9, 8], [3, -1]])) == [
        [5, 6, 1, 2],
        [9, 8, 9, 8],
        [92, 92],
    ]
    runner.commit([[4], [9, 8], []])
    # Under load vLLM schedules fewer tokens.
    round_.num_spec_tokens_to_schedule = 1
    assert propose_with_lookup(runner, round_, torch.tensor([[50, -1], [9, -1], [3, -1]])) == [
        [90],
        [8],
        [92],
    ]
    # Each token was read once: the index is still the first one.
    assert runner.requests["a"].specdistill == ([*first, 3, 4, 50], index)
    assert runner.requests["a"].specdistill[1] is index


def test_a_text_that_is_replaced_is_read_again() -> None:
    runner, round_ = Runner({"a": [1, 2, 3, 4, 1]}), SimpleNamespace(num_spec_tokens_to_schedule=2)
    propose_with_lookup = wrap_propose(Runner.propose, CONFIG)
    assert propose_with_lookup(runner, round_, torch.tensor([[2]])) == [[3, 4]]
    runner.input_batch.token_ids_cpu[0, :3], runner.input_batch.num_tokens_no_spec[0] = [5, 6, 5], 3
    assert propose_with_lookup(runner, round_, torch.tensor([[6]])) == [[5, 6]]
