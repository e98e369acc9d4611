"""Every draft head computes the same with a cache, in a batch, and after it is saved and loaded."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.kv_cache import DraftKVCache
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import StaticTree
from specdistill.methods.chains.objective import UnrollKVCache
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.load import find_method, load_proposer
from specdistill.targets.frozen import FrozenTarget
from tests import mtp_targets
from tests.heads import HEADS, build_head, causal, check_unroll, load_head, save_head
from tests.proposers import state_of
from tests.refusals import refused

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle, two layers and a bias": ("eagle", {"num_layers": 2, "fc_bias": True}),
    "eagle, window": ("eagle", {"sliding_window": 5}),
    "eagle3": ("eagle3", {}),
    "eagle3, norms of 3.1": ("eagle3", {"fc_norm": True, "norm_output": True}),
    "eagle3, norm before residual": ("eagle3", {"norm_before_residual": True}),
    "eagle3, three layers": ("eagle3", {"num_layers": 3}),
    "eagle3, pruned vocabulary": ("eagle3", {"draft_vocabulary": torch.arange(5, 105, 4)}),
    "eagle3, narrower": (
        "eagle3",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
    ),
    "eagle3, four layers read": ("eagle3", {"aux_layers": [0, 1, 3, 4]}),
    "eagle3, window": ("eagle3", {"sliding_window": 4, "num_layers": 2}),
    "mtp": ("mtp", {}),
}


Variant = tuple[str, Any, FrozenTarget]


@pytest.fixture(params=(*VARIANTS, *mtp_targets.KINDS), scope="module")
def variant(request: pytest.FixtureRequest, target: FrozenTarget) -> Variant:
    """A method, one of its heads, and the target of this head.

    The target is a Llama, or of a class with an MTP layer of another kind.
    """
    has_own_target = request.param in mtp_targets.KINDS
    if has_own_target:
        target = mtp_targets.tiny_target(request.param)
    method, shape = VARIANTS["mtp" if has_own_target else request.param]
    head = build_head(method, target, **shape)
    # Change biases and norms, which start as 0 or 1.
    for name, parameter in head.named_parameters():
        if parameter.dim() == 1 and name not in head.shared:
            parameter.data += torch.linspace(0.1, 0.4, len(parameter))
    return method, head, target


def build_kv_cache(head: Any, ids: torch.Tensor) -> UnrollKVCache:
    return causal(ids, head.config.num_layers, head.config.sliding_window)


def test_save_and_load_are_bit_equal(variant: Variant, tmp_path: Path) -> None:
    method, head, target = variant
    save_head(method, head, tmp_path)
    loaded = load_head(method, tmp_path, target)
    assert loaded.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_the_method_of_a_checkpoint_is_found_and_another_is_refused(
    variant: Variant, tmp_path: Path
) -> None:
    method, head, target = variant
    save_head(method, head, tmp_path)
    assert find_method(tmp_path) == method
    for other in set(HEADS) - {method}:
        with refused("eval.draft", f"{tmp_path}, which holds a draft of method {method}"):
            load_proposer(other, tmp_path, target)


def corrupt_checkpoint(folder: Path, change: str) -> None:
    weights, path = folder / "model.safetensors", folder / "config.json"
    tensors, config = load_file(weights), json.loads(path.read_text())
    name = next(name for name in tensors if name.endswith("up_proj.weight"))
    if change == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif change == "no weights":
        weights.unlink()
    elif change == "no config":
        path.unlink()
    elif change == "broken config":
        path.write_text("{")
    elif change == "another target":
        config.get("text_config", config)["vocab_size"] = 77
        path.write_text(json.dumps(config))
    else:
        changed_tensors = {
            "missing": {},
            "unknown": {name: tensors[name], "extra": torch.ones(1)},
            "transposed": {name: tensors[name].T},
        }
        saved_tensors = {
            other: tensor for other, tensor in tensors.items() if other != name
        } | changed_tensors[change]
        save_file({name: tensor.contiguous() for name, tensor in saved_tensors.items()}, weights)


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ("truncated", "model.safetensors"),
        ("no weights", "no weights"),
        ("no config", "which holds model.safetensors"),
        ("broken config", "config.json"),
        ("missing", "without "),
        ("unknown", "with unknown extra"),
        ("transposed", "up_proj.weight of shape (64, 128)"),
        ("another target", "vocab_size 77"),
    ],
)
def test_a_corrupt_checkpoint_or_one_for_another_target_is_refused(
    method: str, change: str, holds: str, target: FrozenTarget, tmp_path: Path
) -> None:
    save_head(method, build_head(method, target), tmp_path)
    corrupt_checkpoint(tmp_path, change)
    with refused("eval.draft", tmp_path, holds=holds):
        load_head(method, tmp_path, target)


def test_cached_steps_equal_the_uncached_pass(variant: Variant) -> None:
    _, head, target = variant
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        hidden = head.fuse(target.features(ids, head.aux_layers))
        whole, _ = head(
            ids, hidden, head.rotary(hidden, torch.arange(12)[None]), build_kv_cache(head, ids)
        )
        cache = DraftKVCache(
            1, partial(head.rotary, hidden), ids.device, head.config.sliding_window
        )
        parts = []
        for start, end in ((0, 5), (5, 6), (6, 12)):
            rotary = cache.begin_chain([end - start])
            normed, _ = head(ids[:, start:end], hidden[:, start:end], rotary, cache)
            parts.append(normed)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)


def test_a_batch_equals_each_row_alone(variant: Variant) -> None:
    _, head, target = variant
    ids = torch.stack((torch.arange(3, 13), torch.arange(40, 50)))
    positions = torch.arange(10).expand(2, 10)
    with torch.no_grad():
        hidden = head.fuse(target.features(ids, head.aux_layers))
        rotary = head.rotary(hidden, positions)
        both, _ = head(ids, hidden, rotary, build_kv_cache(head, ids))
        for row in range(2):
            one_rotary = tuple(table[:1] for table in rotary)
            one, _ = head(
                ids[row : row + 1], hidden[row : row + 1], one_rotary, build_kv_cache(head, ids[:1])
            )
            assert torch.allclose(both[row], one[0], atol=1e-5)


def test_the_unroll_computes_what_the_decoder_drafts(variant: Variant) -> None:
    _, head, target = variant
    check_unroll(head, target)


@torch.no_grad()
def test_draft_tokens_are_drawn_from_the_softmax_of_the_heads_logits(variant: Variant) -> None:
    """Tokens are drawn at T = 0.7 by inversion of the distribution function.

    A token that the head does not have gets probability 0.
    """
    _, head, target = variant
    text = [5, 9, 17, 30, 8]
    uniforms = torch.rand(2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    features = target.features(torch.tensor([text[:-1]]), head.aux_layers)
    ids, hidden = torch.tensor([text[1:]]), head.fuse(features)
    normed, _ = head(
        ids, hidden, head.rotary(hidden, torch.arange(4)[None]), build_kv_cache(head, ids)
    )
    expected = torch.zeros(target.vocab_size)
    expected[head.target_ids_W] = (head.logits(normed[0, -1]) / 0.7).softmax(-1)
    for tree in (None, StaticTree((1, 1))):
        proposer, generator = HeadProposer(head), torch.Generator().manual_seed(0)
        proposer.begin([20])
        drafting = state_of(text, features), tree or 2, Sampling(0.7), [generator]
        (proposal,) = proposer.propose_tree(*drafting) if tree else proposer.propose(*drafting)
        assert proposal.probabilities is not None and torch.allclose(
            proposal.probabilities[0], expected, atol=1e-6
        )
        if tree is None:
            sums = proposal.probabilities.double().cumsum(-1)
            assert proposal.tokens == [
                int((row <= uniform).sum()) for row, uniform in zip(sums, uniforms, strict=True)
            ]


def test_a_chain_longer_than_the_window_is_refused(target: FrozenTarget, tmp_path: Path) -> None:
    head = build_head("eagle3", target, sliding_window=2)
    save_head("eagle3", head, tmp_path)
    decoder = Decoder(target, load_proposer("eagle3", tmp_path, target))
    with refused(
        "eval.num_speculative_tokens",
        "3 draft steps with a draft whose sliding window is 2 positions",
    ):
        decoder.generate([5, 6, 7], max_new_tokens=4, num_speculative_tokens=3)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_rotary_frequencies_stay_exact_in_bfloat16(target: FrozenTarget, method: str) -> None:
    head, positions = build_head(method, target), torch.tensor([[2047]])
    like = torch.zeros(1)
    exact = head.rotary(like, positions)
    for table, expected in zip(head.to(torch.bfloat16).rotary(like, positions), exact, strict=True):
        assert torch.equal(table, expected)
