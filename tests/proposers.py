"""Proposers of every method for a tiny target, whose drafts are sometimes accepted.

One of them has a distribution of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdistill.decoding.lookup_first import LookupFirstProposer
from specdistill.decoding.proposer import DecodingState, Proposal, Proposer
from specdistill.decoding.sampling import Generators, Sampling, draw_tokens
from specdistill.decoding.tree import DynamicTree, StaticTree, Tree, has_drawn_candidates
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.early_exit.method import ExitProposer
from specdistill.methods.early_exit.module import build_exit
from specdistill.methods.load import load_method
from specdistill.methods.lookups.method import LookupProposer
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.methods.models.vocabulary import SharedVocabulary
from specdistill.methods.ngram.lookup import NgramLookup
from specdistill.methods.suffix.lookup import SuffixLookup
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.targets.frozen import FrozenTarget
from tests.draft_models import half_right, translated
from tests.heads import block_proposer, build_head
from tests.tiny import qwen, tiny_target_model, tiny_tokenizer


def state_of(text: list[int], fresh: Any = None) -> DecodingState:
    """Return the state of one sequence, all of it new to a draft."""
    return DecodingState([text], fresh, [len(text) - 1])


def tiny_target(seed: int = 0) -> FrozenTarget:
    return FrozenTarget(tiny_target_model(num_layers=2, seed=seed), tiny_tokenizer(), name="tiny")


@dataclass
class ModelProposer:
    """A proposer that drafts with a whole model, without a cache.

    It drafts the model's greedy tokens (one-hot) or tokens drawn from its distribution.
    """

    model: torch.nn.Module
    one_hot: bool = False
    aux_layers: tuple[int, ...] = ()
    num_parameters: int = 7
    num_bytes: int = 28
    vocabulary: None = None
    reader: None = None
    depends_on_width: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def has_drawn_candidates(
        self, sampling: Sampling, tree: StaticTree | DynamicTree | None
    ) -> bool:
        return not self.one_hot and has_drawn_candidates(sampling, tree)

    def count_passes(self, k: int) -> int:
        return k

    def begin(self, max_lengths: Sequence[int]) -> None:
        pass

    def keep(self, rows: Sequence[int]) -> None:
        pass

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        return [
            self.after(*row, k, sampling) for row in zip(state.token_ids, generators, strict=True)
        ]

    def after(
        self, text: list[int], generator: torch.Generator | None, k: int, sampling: Sampling
    ) -> Proposal:
        tokens, distributions = list(text), []
        for _ in range(k):
            logits = self.model(torch.tensor([tokens])).logits[0, -1]
            if sampling.is_greedy or self.one_hot:
                tokens.append(int(logits.argmax()))
            else:
                distributions.append(sampling.compute_probabilities(logits.unsqueeze(0))[0])
                uniform = torch.rand(1, generator=generator, dtype=torch.float64)
                tokens.append(int(draw_tokens(distributions[-1].unsqueeze(0), uniform)))
        return Proposal(tokens[len(text) :], torch.stack(distributions) if distributions else None)


class FirstTokens(ModelProposer):
    """A proposer of the target's own next tokens, of which the last one is made wrong.

    K - 1 are accepted of every draft.
    """

    def after(self, *arguments: Any) -> Proposal:
        tokens = super().after(*arguments).tokens
        return Proposal([*tokens[:-1], (tokens[-1] + 1) % 260])


class Oracle:
    """A proposer that drafts the rest of the known sequence that begins like the text.

    It drafts from the first sequence where none begins so. In a tree the tokens are among wrong
    ones: a node's right child is the last of two.
    """

    aux_layers: tuple[int, ...] = ()
    num_parameters = num_bytes = 0
    reader = None

    def __init__(self, *sequences: list[int]) -> None:
        self.sequences = sequences

    def begin(self, max_lengths: Sequence[int]) -> None:
        pass

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        first = self.sequences[0]
        right = [
            next((it for it in self.sequences if it[: len(text)] == text), first)
            for text in state.token_ids
        ]
        return [
            Proposal(whole[len(text) : len(text) + k])
            for whole, text in zip(right, state.token_ids, strict=True)
        ]

    def propose_tree(
        self,
        state: DecodingState,
        shape: StaticTree | DynamicTree,
        sampling: Sampling,
        generators: Generators,
    ) -> list[Proposal]:
        return [
            self.among_wrong(right.tokens)
            for right in self.propose(state, shape.depth, sampling, generators)
        ]

    def among_wrong(self, right: list[int]) -> Proposal:
        tokens = [token for pair in right for token in ((pair + 1) % 200, pair)]
        parents = tuple(node for level in range(len(right)) for node in [2 * level - 1] * 2)
        return Proposal(tokens, None, Tree(parents)) if tokens else Proposal([])


def half_the_vocabulary(target: FrozenTarget) -> SharedVocabulary:
    """Return the vocabulary of a draft that shares only the even ids of the target."""
    even = torch.arange(0, target.vocab_size, 2)
    return SharedVocabulary(even, even, target.vocab_size, target.tokenizer, target.tokenizer)


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "eagle3, two layers": ("eagle3", {"num_layers": 2, "norm_output": True}),
    "eagle3, pruned": ("eagle3", {"draft_vocabulary": torch.arange(0, 260, 3)}),
    "eagle3, window": ("eagle3", {"sliding_window": 4}),
    "eagle": ("eagle", {}),
    "mtp": ("mtp", {}),
}
OTHERS: dict[str, Callable[[FrozenTarget], Proposer]] = {
    "dflash": lambda target: block_proposer("dflash", target),
    "dflash, pruned, causal, window": lambda target: block_proposer(
        "dflash", target, draft_vocabulary=torch.arange(0, 260, 3), is_causal=True, sliding_window=9
    ),
    "dspark": lambda target: block_proposer("dspark", target, sliding_window=9),
    "dspark, gated": lambda target: block_proposer(
        "dspark", target, markov_head_type="gated", enable_confidence_head=False
    ),
    "dspark, rnn": lambda target: block_proposer(
        "dspark", target, markov_head_type="rnn", is_causal=True
    ),
    "ngram+dspark": lambda target: behind_lookup(block_proposer("dspark", target), min=1),
    "draft_model": lambda target: DraftModelProposer(half_right(target)),
    "pard": lambda target: DraftModelProposer(half_right(target), mask_token_id=2),
    "pard, of transformers": lambda target: DraftModelProposer(
        qwen(), mask_token_id=2, vocabulary=half_the_vocabulary(target)
    ),
    "draft_model, shared half": lambda target: DraftModelProposer(
        half_right(target), vocabulary=half_the_vocabulary(target)
    ),
    "draft_model, other vocabulary": translated,
    "draft_model, of transformers": lambda target: DraftModelProposer(qwen()),
    "the target itself": lambda target: DraftModelProposer(target.model),
    "ngram": lambda target: ngram_proposer(),
    "ngram+eagle3": lambda target: behind_lookup(proposer_of("eagle3", target), min=1),
    "suffix": lambda target: suffix_proposer(),
    "suffix+eagle3": lambda target: behind_lookup(
        proposer_of("eagle3", target), method="suffix", min=1
    ),
    "ngram+draft_model": lambda target: behind_lookup(
        DraftModelProposer(half_right(target)), min=1
    ),
    "ngram+tree of eagle3": lambda target: behind_lookup(
        proposer_of("eagle3", target), draft_tree={"branching": [2, 2]}
    ),
}


# One sequence, and this decoder alone.
SHARING: dict[str, Callable[[FrozenTarget], Proposer]] = {
    "early_exit": lambda target: ExitProposer(build_exit(target), target),
    "ngram+early_exit": lambda target: behind_lookup(proposer_of("early_exit", target), min=1),
}


def ngram_proposer(*arguments: Any, **options: Any) -> LookupProposer:
    return LookupProposer(NgramLookup(*arguments, **options))


def suffix_proposer(**keys: Any) -> LookupProposer:
    return LookupProposer(SuffixLookup(**keys))


def behind_lookup(draft: Proposer, **keys: Any) -> LookupFirstProposer:
    config = LookupFirstConfig(**keys)
    lookup = load_method(config.method).build_lookup
    return LookupFirstProposer(draft, lookup(config.min, config.max), config)


def proposer_of(name: str, target: FrozenTarget) -> Proposer:
    if build := OTHERS.get(name) or SHARING.get(name):
        return build(target)
    method, shape = SHAPES[name]
    return HeadProposer(build_head(method, target, **shape))
