"""Mistakes in this project's own code, each injected with and without a draft alike: the report's
`lossless` must show every one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from specdistill.decoding import verify
from specdistill.decoding.sampling import Sampling, draw_tokens
from specdistill.evaluation.gate.decide import Evidence, decide
from specdistill.evaluation.gate.rules import load_gate
from specdistill.evaluation.measurement.configurations import Settings
from specdistill.evaluation.measurement.losslessness import (
    check_greedy,
    run_sampling_test,
    summarize_greedy,
)
from specdistill.evaluation.suites.suite import Prompt
from specdistill.targets.frozen import FrozenTarget
from tests.measuring import measure
from tests.proposers import ModelProposer
from tests.tiny import tiny_target_model, tiny_tokenizer

PROMPTS = [Prompt(f"p{number}", "c", "text", (1 + number, 2, 3, 4)) for number in range(2)]
TEMPERATURE = 0.7
Patch = pytest.MonkeyPatch
Mistake = Callable[[FrozenTarget, Patch], None]


def build_model(seed: int) -> Any:
    """Return a model of eight tokens with clear favourites, none of which ends a completion.

    Few draws tell the distributions of such models apart.
    """
    model = tiny_target_model(num_layers=1, vocab_size=8, seed=seed)
    model.generation_config.eos_token_id = []
    model.lm_head.weight.data *= 2
    return model


def list_failed_rules(make_mistake: Callable[[FrozenTarget], None], num_draws: int) -> list[str]:
    """Return the default gate's rules on losslessness that a measurement with the mistake fails."""
    target, draft = (
        FrozenTarget(build_model(0), tiny_tokenizer(), name="eight"),
        ModelProposer(build_model(3)),
    )
    make_mistake(target)
    settings = Settings(2, 16, sampling=Sampling(TEMPERATURE), repeats=1, warmup=0)
    lossless = summarize_greedy(
        check_greedy(target, draft, measure(target, draft, PROMPTS, settings), settings)
    )
    sampled = run_sampling_test(target, draft, PROMPTS, settings, num_draws=num_draws)
    lossless["sampling_test"] = sampled if isinstance(sampled, dict) else {}
    rules = [rule for rule in load_gate("default") if rule.metric.startswith("lossless")]
    found = decide(
        rules, Evidence({"lossless": lossless, "not_measured": {}, "settings": {}}, []), None
    )["rules"]
    return [rule["metric"].rpartition(".")[2] for rule in found if not rule["passed"]]


def change_logits(change: Callable[[Tensor], Tensor]) -> Mistake:
    def patch_logits(target: FrozenTarget, patch: Patch) -> None:
        original = target.logits
        patch.setattr(target, "logits", lambda hidden: change(original(hidden)))

    return patch_logits


def ignore_temperature(_target: FrozenTarget, patch: Patch) -> None:
    patch.setattr(
        Sampling, "compute_probabilities", lambda sampling, logits: logits.float().softmax(-1)
    )


def skip_residual(_target: FrozenTarget, patch: Patch) -> None:
    """Draw the token after a rejected one from the target's distribution, not from the residual."""
    original = verify.verify_sampled_chain

    def verify_without_residual(
        tokens: Tensor, target_probs: Tensor, draft_probs: Tensor | None, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        num_accepted, _ = original(tokens, target_probs, draft_probs, uniforms)
        rows = torch.arange(len(tokens))
        return num_accepted, draw_tokens(target_probs[rows, num_accepted], uniforms[:, -1])

    patch.setattr(verify, "verify_sampled_chain", verify_without_residual)


def keep_stale_entry(_target: FrozenTarget, patch: Patch) -> None:
    """Leave one rejected token in the KV cache."""
    crop = DynamicCache.crop
    patch.setattr(
        DynamicCache, "crop", lambda cache, length: crop(cache, length + 1) if length < -1 else None
    )


MISTAKES: dict[str, tuple[Mistake, str]] = {
    "a scale of the logits": (change_logits(lambda logits: 2 * logits), "p_value"),
    "a soft cap": (change_logits(lambda logits: 2 * torch.tanh(logits / 2)), "p_value"),
    "a bias of the head": (
        change_logits(lambda logits: logits + torch.arange(8) / 4),
        "unexplained_divergences",
    ),
    "temperature": (ignore_temperature, "p_value"),
    "residual": (skip_residual, "p_value"),
    "stale entry": (keep_stale_entry, "unexplained_divergences"),
}


def test_without_a_mistake_every_rule_holds() -> None:
    assert list_failed_rules(lambda target: None, num_draws=100) == []


@pytest.mark.parametrize(
    ("name", "num_draws"),
    [
        ("a bias of the head", 0),
        ("stale entry", 0),
        ("residual", 100),
        # a second and a half each, as for the residual
        pytest.param("a scale of the logits", 160, marks=pytest.mark.long),
        pytest.param("a soft cap", 160, marks=pytest.mark.long),
        pytest.param("temperature", 160, marks=pytest.mark.long),
    ],
)
def test_a_mistake_fails_a_rule_on_losslessness(
    name: str, num_draws: int, monkeypatch: Patch
) -> None:
    mistake, shows_in = MISTAKES[name]
    assert shows_in in list_failed_rules(lambda target: mistake(target, monkeypatch), num_draws)
