"""The formulas of a plan agree with values computed by hand and with the drafts themselves."""

import pytest
import torch
from transformers import LlamaConfig

from specdistill.advice.plan import estimates as costs
from specdistill.evaluation.statistics.theory import alpha_from_acceptance_length
from specdistill.methods.chains.head import count_parameters
from specdistill.methods.eagle import advice as eagle
from specdistill.methods.eagle.module import EagleConfig, EagleDraft
from specdistill.methods.eagle3 import advice as eagle3
from specdistill.methods.eagle3.module import Eagle3Config, Eagle3Draft
from specdistill.methods.mtp.advice import MtpAdvice
from specdistill.methods.sizes import ModelConfigInfo, ModelShape, ParameterCounts

LLAMA_8B = ModelShape(1, 4096, 14336, 32, 8, 128)
# 8,030,261,248 parameters less an embedding of 525,336,576
VOCABULARY, TARGET_READ = 128_256, 7_504_924_672


def count_eagle_head() -> ParameterCounts:
    with torch.device("meta"):
        return count_parameters(EagleDraft(EagleConfig(vocab_size=VOCABULARY, **vars(LLAMA_8B))))


def count_eagle3_head() -> ParameterCounts:
    sizes = {"vocab_size": VOCABULARY, "draft_vocab_size": 32_000, "target_hidden_size": 4096}
    with torch.device("meta"):
        head = Eagle3Draft(
            Eagle3Config(**vars(LLAMA_8B), **sizes, aux_layers=(2, 16, 29), target_num_layers=32)
        )
    return count_parameters(head, once_per_round={"fc.weight"})


def compute_shares(head: ParameterCounts) -> dict[str, float]:
    return {"weights": head.read / TARGET_READ, "layers": head.num_layers / 32}


def test_parameters_of_an_eagle3_head_are_those_counted_by_hand():
    # A layer has q, k and v with 48·128·8192 weights, o with 4096², an MLP with 3·4096·14336, and
    # two norms. Then come the norm of the hidden half, the last norm, the head and fc.
    layer = 50_331_648 + 16_777_216 + 176_160_768 + 8_192
    head = count_eagle3_head()
    assert head.read == layer + 8_192 + 131_072_000 == 374_358_016
    assert head.parameters == head.read + 3 * 4096**2
    assert compute_shares(head) == pytest.approx({"weights": 0.04988, "layers": 0.03125}, rel=1e-3)


def test_an_eagle_head_borrows_the_target_s_head():
    head = count_eagle_head()
    assert head.parameters == 2 * 4096**2 + 25_165_824 + 16_777_216 + 176_160_768 + 4_096
    assert head.read == head.parameters + 525_336_576
    assert head.copied == 2 * 525_336_576


def test_native_layers_are_all_kept_and_read_one_at_a_time():
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 260,
    }
    config = LlamaConfig(**sizes)
    one, three = (
        MtpAdvice()
        .plan_draft(
            ModelConfigInfo(
                "tiny", "target.model", None, None, config.to_dict(), config, ("num_mtp_layers", n)
            ),
            None,
            {},
        )
        .parts
        for n in (1, 3)
    )
    layer = 4 * 64**2 + 3 * 64 * 96 + 2 * 64
    assert one.parameters == 2 * 64**2 + 3 * 64 + layer and three.parameters == 3 * one.parameters
    assert one.read == three.read == one.parameters + 260 * 64


def test_the_selected_k_has_the_highest_speedup():
    # Acceptance lengths of 1.5, 1.75 and 1.875 cost 1.2, 1.4 and 1.6 steps.
    best = costs.select_best_k(0.5, [1.0] * 3, 0.2)
    assert (best.num_speculative_tokens, best.acceptance_length) == (1, 1.5)
    assert best.speedup == pytest.approx(1.25)
    free = costs.select_best_k(0.5, [1.0] * 8, 0.0)
    assert free.num_speculative_tokens == 6  # its acceptance length is 1.984 of at most 1.996


def test_the_fitted_overhead_reproduces_a_measured_speedup():
    """vLLM issue 20780 has v = 1.18, c = 0.144, and a speedup of 1.75 at AL 3.08 with K = 4."""
    head = count_eagle3_head()
    shares = compute_shares(head)
    assert max(shares.values()) + costs.LAYERS_OVERHEAD / 32 == pytest.approx(0.144, rel=0.01)
    alpha = alpha_from_acceptance_length(3.08, 4)
    low, high = costs.compute_speedup_range((alpha, alpha), [1.0] * 8, shares, 32)
    assert low.speedup == pytest.approx(1.75, rel=0.02)
    assert high.speedup == pytest.approx(2.70, rel=0.01)


def test_published_speedups_lie_in_the_estimated_ranges():
    """EAGLE has a speedup of 1.65, and EAGLE-3 of 1.75 and 2.42, on MT-bench.

    They are from vLLM issue 20780, and from PARD's tables of vLLM 0.16 on an A100.
    """
    heads = {"eagle": count_eagle_head(), "eagle3": count_eagle3_head()}
    published = {"eagle": eagle.PUBLISHED_FIGURES, "eagle3": eagle3.PUBLISHED_FIGURES}
    for method, speedups in {"eagle": (1.65,), "eagle3": (1.75, 2.42)}.items():
        shares = compute_shares(heads[method])
        low, high = costs.compute_speedup_range(published[method].alphas, [1.0] * 8, shares, 32)
        assert all(low.speedup < speedup < high.speedup for speedup in speedups)


def test_a_mixture_of_experts_pays_for_the_verification_of_a_lookup():
    shares = {"weights": 0.0, "layers": 0.0}
    dense, _ = costs.compute_speedup_range((0.4, 0.4), [1.0] * 8, shares, 32)
    mixture, high = costs.compute_speedup_range(
        (0.4, 0.4), [1 + 0.5 * k for k in range(1, 9)], shares, 32
    )
    assert dense.speedup == pytest.approx(1 / 0.6 / 1.18, rel=0.02)
    assert mixture.speedup == pytest.approx(1.4 / 1.68) and high.speedup > 1.6


def test_training_memory_is_the_sum_computed_by_hand():
    parts = ParameterCounts(parameters=1000, read=900, num_layers=2, copied=500)
    shape = ModelShape(2, 8, 16, 2, 1, 4)
    # two layers of 2·(28·8 + 4·16) bytes for each of 10 tokens and 3 steps, and 4,096 rows of 100
    # logits in bfloat16
    assert costs.estimate_training_memory(parts, 5000, shape, 100, 3, 10) == {
        "target": 5000, "draft": 16_000, "frozen tables": 2000,
        "activations": 30 * 1152 + 2 * 4096 * 100
    }  # fmt: skip
