"""Every type of causal model in transformers, compared with its own forward and `generate()`."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdistill.decoding.decoder import Decoder, verify_sampled
from specdistill.decoding.near_ties import compute_logits_in_float64
from specdistill.decoding.proposer import Proposal, Proposer
from specdistill.decoding.sampling import Random, Sampling
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.targets.anatomy import reads_alike
from specdistill.targets.frozen import FrozenTarget
from tests.proposers import ngram_proposer
from tests.targets.architectures import (
    HEADS,
    KINDS,
    PAGE,
    TRAINED,
    format_tables,
    make_row,
    read_page,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of some of two hundred classes
# One of each kind of layer and of head. The others are marked long: there are two hundred.
QUICK = (
    "llama", "gemma2", "granite", "cohere", "mistral", "mixtral", "deepseek_v3", "gpt_oss",
    "qwen3_next", "gpt2", "bloom", "bert",
)  # fmt: skip
PROMPT = torch.tensor([[*range(3, 15), 9, 10, 11, 9, 10, 11]])
SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=8)
LIBRARY = LogitsProcessorList(
    [TemperatureLogitsWarper(0.7), TopKLogitsWarper(8), TopPLogitsWarper(0.9)]
)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind not in QUICK)) for kind in KINDS]
)
def test_a_kind_decodes_losslessly_or_is_refused(kind: str) -> None:
    """One test makes all checks of a kind, because building the model takes most of the time."""
    row, target = make_row(kind)
    assert row in read_page()
    if target is None:
        return
    *_, logits, drafts, _, batches, packed = row.cells
    spread_logits(target)
    proposers: list[Proposer] = [ngram_proposer()]
    for name, build in HEADS.items():
        if name in (TRAINED if drafts == "all" else drafts.split(", ")):
            proposers.append(HeadProposer(build(target)))
            break
    check_features(target)
    if packed != "–":
        check_packing(target)
    check_greedy(target, proposers)
    check_ties(target)
    if logits != "–":
        check_distributions(target, proposers[-1])
    if logits != "–" and batches == "yes":
        check_samples(target, proposers[-1])


@torch.no_grad()
def spread_logits(target: FrozenTarget) -> None:
    """Scale the head until logits are several units apart, as in trained models.

    A factor or a cap then changes the distribution.
    """
    raw = target.lm_head(target.features(PROMPT, ()).last_hidden)
    target.lm_head.weight.mul_(4 / float(raw.std() * target.logits.scale))


def check_features(target: FrozenTarget) -> None:
    output = target.model(PROMPT, output_hidden_states=True)
    streams = output.hidden_states or ()
    one_stream = len(streams) == target.num_layers + 1 and streams[1].shape == (
        *PROMPT.shape,
        target.hidden_size,
    )
    layers = (1, target.num_layers - 1) if one_stream else ()
    features = target.features(PROMPT, layers)
    assert torch.allclose(target.logits(features.last_hidden), output.logits, atol=1e-4)
    for layer, captured in zip(layers, features.aux, strict=True):
        assert torch.equal(captured, streams[layer])


@torch.no_grad()
def check_packing(target: FrozenTarget) -> None:
    """Check that each packed document has the features that it has alone.

    The documents are longer than the windows and chunks of these models.
    """
    ids, positions = torch.arange(3, 43)[None], torch.arange(40)[None] % 22
    together = target.features(ids, (), position_ids_BT=positions).last_hidden[0]
    for part in (slice(22), slice(22, 40)):
        assert reads_alike(together[part], target.features(ids[:, part], ()).last_hidden[0])


def check_greedy(target: FrozenTarget, proposers: list[Proposer]) -> None:
    # no forced tokens
    target.model.generation_config = GenerationConfig(
        do_sample=False, pad_token_id=0, eos_token_id=2
    )
    expected = target.model.generate(PROMPT, max_new_tokens=8)[0, PROMPT.shape[1] :].tolist()
    for proposer in proposers:
        result = Decoder(target, proposer).generate(
            PROMPT[0].tolist(), max_new_tokens=8, num_speculative_tokens=3
        )
        assert list(result.token_ids) == expected, type(proposer).__name__


def check_ties(target: FrozenTarget) -> None:
    """Check that float64, which breaks near-ties, agrees with float32 and changes no weights."""
    expected = target.model(PROMPT).logits
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    assert torch.allclose(
        compute_logits_in_float64(target, PROMPT[0].tolist(), len(PROMPT[0])).float(),
        expected,
        atol=1e-3,
    )
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in target.model.state_dict().items()
    )


def library_probabilities(target: FrozenTarget, ids_BT: Tensor) -> Tensor:
    """Return the next token's probabilities by transformers' own logits processors, [B, V]."""
    return LIBRARY(ids_BT, target.model(ids_BT).logits[:, -1].float()).softmax(-1)


def check_distributions(target: FrozenTarget, proposer: Proposer) -> None:
    """Check every distribution that is passed to the rule for sampling."""
    rule_inputs: list[tuple[list[int], Tensor]] = []

    def rule(proposal: Proposal, probs_NV: Tensor, generator: Random) -> tuple[Sequence[int], int]:
        rule_inputs.append((proposal.tokens, probs_NV))
        return verify_sampled(proposal, probs_NV, generator)

    result = Decoder(target, proposer, rule=rule).generate(
        PROMPT[0].tolist(),
        max_new_tokens=4,
        num_speculative_tokens=2,
        sampling=SAMPLING,
        generator=torch.Generator().manual_seed(0),
    )
    ids, length = [*PROMPT[0].tolist(), *result.token_ids], PROMPT.shape[1]
    for (draft_tokens, probs_NV), num_emitted in zip(
        rule_inputs, [1, *(len(round.emitted) for round in result.rounds)], strict=True
    ):
        for position, probs_V in enumerate(probs_NV):
            expected_V = library_probabilities(
                target, torch.tensor([[*ids[:length], *draft_tokens[:position]]])
            )[0]
            assert (probs_V - expected_V).abs().sum() / 2 < 1e-4
        length += num_emitted


def check_samples(target: FrozenTarget, proposer: Proposer) -> None:
    """Check that a batch draws what each of its rows draws alone.

    `check_distributions` compares the distributions.
    """
    prompt, seeds = PROMPT[0].tolist(), range(16)
    options: dict[str, Any] = {
        "max_new_tokens": 4,
        "num_speculative_tokens": 2,
        "sampling": SAMPLING,
    }
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    together = Decoder(target, proposer).generate_all(
        [prompt] * len(seeds), generators=generators, **options
    )
    for seed, result in zip(seeds, together, strict=True):
        alone = Decoder(target, proposer).generate(
            prompt, generator=torch.Generator().manual_seed(seed), **options
        )
        assert result.token_ids == alone.token_ids


def test_the_page_has_the_tables_of_its_rows() -> None:
    rows = read_page()
    assert sorted(row.cells[0] for row in rows) == sorted(KINDS)
    assert f"<!-- kinds -->\n{format_tables(rows)}\n<!-- /kinds -->\n" in PAGE.read_text(
        encoding="utf-8"
    )
