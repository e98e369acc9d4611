"""What holds for every draft head: cached == uncached, batch == single, checkpoints that come back bit for bit, and are told apart."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.kv_cache import DraftKVCache
from specdistill.errors import UserError
from specdistill.methods.chains.attention import UnrollKVCache
from specdistill.methods.load import load_proposer, method_of
from specdistill.targets.frozen import FrozenTarget
from tests.heads import HEADS, build_head, causal, load_head, save_head
from tests.tiny import tiny_target_model, tiny_tokenizer

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle, two layers and a bias": ("eagle", {"num_layers": 2, "fc_bias": True}),
    "eagle, window": ("eagle", {"sliding_window": 3}),
    "eagle3": ("eagle3", {}),
    "eagle3, norms of 3.1": ("eagle3", {"fc_norm": True, "norm_output": True}),
    "eagle3, norm before residual": ("eagle3", {"norm_before_residual": True}),
    "eagle3, three layers": ("eagle3", {"num_layers": 3}),
    "eagle3, pruned vocabulary": ("eagle3", {"draft_vocabulary": torch.arange(5, 105, 4)}),
    "eagle3, narrower": (
        "eagle3",
        {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "eagle3, four layers read": ("eagle3", {"aux_layers": [0, 1, 3, 4]}),
    "mtp": ("mtp", {"init": "scratch"}),
    "eagle3, window": ("eagle3", {"sliding_window": 4, "num_layers": 2}),
}


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")


@pytest.fixture(params=VARIANTS, scope="module")
def variant(request: pytest.FixtureRequest, target: FrozenTarget) -> tuple[str, Any]:
    """A method and one of its heads."""
    method, shape = VARIANTS[request.param]
    head = build_head(method, target, **shape)
    for name, parameter in head.named_parameters():  # biases and norms too, which start as nothing
        if parameter.dim() == 1 and name not in head.shared:
            parameter.data += torch.linspace(0.1, 0.4, len(parameter))
    return method, head


def kv_cache(head: Any, ids: torch.Tensor) -> UnrollKVCache:
    return causal(ids, head.config.num_layers, head.config.sliding_window)


def test_save_and_load_are_bit_equal(variant: tuple[str, Any], target: FrozenTarget, tmp_path: Path) -> None:
    method, head = variant
    save_head(method, head, tmp_path)
    loaded = load_head(method, tmp_path, target)
    assert loaded.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_its_method_is_seen_and_another_is_refused(variant: tuple[str, Any], target: FrozenTarget, tmp_path: Path) -> None:
    method, head = variant
    save_head(method, head, tmp_path)
    assert method_of(tmp_path) == method
    for other in set(HEADS) - {method}:
        with pytest.raises(UserError, match=rf"holds a draft of method {method}, expected one of method {other}"):
            load_proposer(other, tmp_path, target)


def test_cached_steps_equal_the_uncached_pass(variant: tuple[str, Any], target: FrozenTarget) -> None:
    _, head = variant
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        hidden = head.fuse(target.features(ids, head.aux_layers))
        whole, _ = head(ids, hidden, head.rotary(hidden, torch.arange(12)[None]), kv_cache(head, ids))
        cache = DraftKVCache(head.config.num_layers, partial(head.rotary, hidden), ids.device, head.config.sliding_window)
        parts = []
        for start, end in ((0, 5), (5, 6), (6, 12)):
            normed, _ = head(ids[:, start:end], hidden[:, start:end], cache.next_rotary(end - start), cache)
            parts.append(normed)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)


def test_batch_equals_single(variant: tuple[str, Any], target: FrozenTarget) -> None:
    _, head = variant
    ids = torch.stack((torch.arange(3, 13), torch.arange(40, 50)))
    positions = torch.arange(10).expand(2, 10)
    with torch.no_grad():
        hidden = head.fuse(target.features(ids, head.aux_layers))
        rotary = head.rotary(hidden, positions)
        both, _ = head(ids, hidden, rotary, kv_cache(head, ids))
        for row in range(2):
            one_rotary = tuple(table[:1] for table in rotary)
            one, _ = head(ids[row : row + 1], hidden[row : row + 1], one_rotary, kv_cache(head, ids[:1]))
            assert torch.allclose(both[row], one[0], atol=1e-5)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_window_hides_what_lies_before_it(target: FrozenTarget, method: str) -> None:
    """The last position of a head with a window of 4 does not change with what stands 4 or more before it, and does with what stands 3."""
    head = build_head(method, target, sliding_window=4)
    ids = torch.arange(3, 15)[None]
    hidden = head.fuse(target.features(ids, head.aux_layers)).detach()

    def last(changed: int | None) -> torch.Tensor:
        states = hidden.clone()
        if changed is not None:
            states[:, changed] += 1.0
        with torch.no_grad():
            return head(ids, states, head.rotary(states, torch.arange(12)[None]), kv_cache(head, ids))[0][0, -1]

    assert torch.allclose(last(7), last(None), atol=1e-6)
    assert not torch.allclose(last(8), last(None), atol=1e-3)


def test_a_chain_longer_than_the_window_is_refused(target: FrozenTarget, tmp_path: Path) -> None:
    head = build_head("eagle3", target, sliding_window=2)
    save_head("eagle3", head, tmp_path)
    decoder = Decoder(target, load_proposer("eagle3", tmp_path, target))
    with pytest.raises(UserError, match=r"eval\.num_speculative_tokens: got 3 steps with a draft that sees 2 positions"):
        decoder.generate([5, 6, 7], max_new_tokens=4, num_speculative_tokens=3)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_rotary_frequencies_stay_exact_in_bfloat16(target: FrozenTarget, method: str) -> None:
    head, positions = build_head(method, target), torch.tensor([[2047]])
    like = torch.zeros(1)
    exact = head.rotary(like, positions)
    for table, expected in zip(head.to(torch.bfloat16).rotary(like, positions), exact, strict=True):
        assert torch.equal(table, expected)
