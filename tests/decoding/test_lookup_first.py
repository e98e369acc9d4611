"""A lookup in front of a draft: either of them drafts, and the draft reads all committed tokens."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.lookup_first import LookupFirstProposer
from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.sampling import GREEDY, Generators, Sampling
from specdistill.decoding.tree import DynamicTree
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.targets.frozen import FrozenTarget
from tests.proposers import behind_lookup, ngram_proposer, state_of, tiny_target
from tests.refusals import refused

PROMPT = [5, 9, 5, 9, 6, 5, 9]


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return tiny_target()


class ProposalRecorder(LookupFirstProposer):
    """A proposer that records every proposal with the sequence that it follows."""

    def begin(self, max_lengths: Sequence[int]) -> None:
        super().begin(max_lengths)
        self.proposed: list[tuple[list[int], list[int]]] = []

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        proposals = super().propose(state, k, sampling, generators)
        self.proposed.append((list(state.token_ids[0]), proposals[0].tokens))
        return proposals


@pytest.mark.parametrize(
    "shape", [{"draft_tokens": 2}, {"draft_tree": {"budget": 5, "depth": 2, "top_k": 3}}]
)
def test_the_draft_drafts_where_nothing_is_found_as_if_it_had_read_every_round(
    target: FrozenTarget, shape: dict[str, Any]
) -> None:
    head, config = HeadProposer(build_eagle3(target)), LookupFirstConfig(min=2, max=3, **shape)
    recorder, lookup = ProposalRecorder(head, ngram_proposer(2, 3), config), ngram_proposer(2, 3)
    Decoder(target, recorder).generate(PROMPT, max_new_tokens=60, num_speculative_tokens=4)
    draft_rounds = {True: 0, False: 0}  # whether a round of a lookup came before the draft's
    looked_up = False
    for text, tokens in recorder.proposed:
        lookup.begin([100])
        if lookup_tokens := lookup.propose(state_of(text), 4, GREEDY, [None])[0].tokens:
            assert tokens == lookup_tokens
        else:
            head.begin([100])
            fresh = target.features(torch.tensor([text[:-1]]), head.aux_layers)
            arguments = (
                state_of(text, fresh),
                DynamicTree(5, 2, 3) if config.draft_tree else 2,
                GREEDY,
                [None],
            )
            (draft_proposal,) = (
                head.propose_tree(*arguments) if config.draft_tree else head.propose(*arguments)
            )
            assert tokens == draft_proposal.tokens and len(tokens) == (
                5 if config.draft_tree else 2
            )
            draft_rounds[looked_up] += 1
        looked_up = bool(lookup_tokens)
    assert all(draft_rounds.values()), draft_rounds


def test_a_draft_model_catches_up_with_the_lookups_tokens(target: FrozenTarget) -> None:
    plain = Decoder(target).generate(PROMPT, max_new_tokens=40)
    proposer = behind_lookup(DraftModelProposer(target.model), draft_tokens=3)
    run = Decoder(target, proposer).generate(PROMPT, max_new_tokens=40, num_speculative_tokens=5)
    assert run.token_ids == plain.token_ids
    draft_rounds = [entry for entry in run.rounds if len(entry.drafted) == 3]
    assert draft_rounds and all(
        entry.num_accepted == 3 for entry in draft_rounds[:-1]
    )  # the draft is the target


def test_rows_are_looked_up_and_drawn_in_one_round_of_a_batch(target: FrozenTarget) -> None:
    """Both propose as many tokens; certain tokens are verified differently from drawn ones."""
    proposer, prompts = (
        behind_lookup(DraftModelProposer(target.model), min=1, draft_tokens=2),
        [list(range(220)), [7]],
    )
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "num_speculative_tokens": 2,
        "sampling": Sampling(0.8),
    }

    def make_generator(row: int) -> torch.Generator:
        return torch.Generator().manual_seed(row)

    together = Decoder(target, proposer).generate_all(
        prompts, generators=[make_generator(0), make_generator(1)], **options
    )
    alone = [
        Decoder(target, proposer).generate(prompt, generator=make_generator(row), **options)
        for row, prompt in enumerate(prompts)
    ]
    assert [run.token_ids for run in together] == [run.token_ids for run in alone]


def test_a_lookup_in_front_of_a_draft_reports_its_settings_and_passes(target: FrozenTarget) -> None:
    head = HeadProposer(
        build_eagle3(target, draft_vocabulary=torch.arange(0, target.vocab_size, 3))
    )
    proposer = behind_lookup(head, min=3, max=4, draft_tokens=2)
    assert proposer.vocabulary is None and (proposer.num_parameters, proposer.aux_layers) == (
        head.num_parameters,
        head.aux_layers,
    )
    assert proposer.settings == {
        "lookup_first": {"method": "ngram", "min": 3, "max": 4, "draft_tokens": 2}
    }
    assert [proposer.count_passes(k) for k in (1, 2, 6)] == [1, 2, 0]
    assert proposer.has_drawn_candidates(Sampling(1.0), None) and not proposer.has_drawn_candidates(
        GREEDY, None
    )
    tree_proposer = behind_lookup(head, draft_tree={"budget": 4, "depth": 3, "top_k": 2})
    tree = {"budget": 4, "depth": 3, "top_k": 2}
    assert tree_proposer.settings == {
        "lookup_first": {"method": "ngram", "min": 2, "max": 5, "draft_tree": tree}
    }
    assert [tree_proposer.count_passes(k) for k in (3, 6)] == [3, 0]
    assert not tree_proposer.has_drawn_candidates(Sampling(1.0), None)  # the best tokens
    with refused("eval.lookup_first.draft_tree", '{"branching": [2]}'):
        behind_lookup(ngram_proposer(), draft_tree={"branching": [2]})
    with refused("eval.lookup_first.draft_tree.budget"):
        behind_lookup(head, draft_tree={"budget": 1, "depth": 3, "top_k": 2})
    with refused("eval.lookup_first.draft_tree.top_k"):
        behind_lookup(head, draft_tree={"budget": 4, "depth": 3})
