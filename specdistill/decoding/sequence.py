"""A sequence while it is decoded, and what decoding returns about it."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdistill.common.errors import UserError
from specdistill.decoding.proposer import Proposal
from specdistill.decoding.sampling import Random
from specdistill.targets.frozen import FrozenTarget


@dataclass(frozen=True)
class Round:
    """One draft-verify round.

    Attributes:
        drafted: draft token ids; empty in plain decoding. For a tree, the accepted path and its
            continuation by first children.
        num_accepted: draft tokens that were accepted and emitted. Accepted tokens past a stop token
            or the length limit do not count.
        emitted: the accepted tokens, then the target's own next token, cut at a stop token or the
            limit.
        num_off_path: draft tokens that are not in `drafted`: the other nodes of a tree.
    """

    drafted: tuple[int, ...]
    num_accepted: int
    emitted: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float
    num_off_path: int = 0


@dataclass(frozen=True)
class Generation:
    """A continuation of a prompt. Its first token comes from the prefill, not from a round.

    Attributes:
        stopped: whether the continuation ended with a stop token, and not at the limit.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    rounds: tuple[Round, ...]
    prefill_seconds: float
    seconds: float
    stopped: bool


class SequenceState:
    """A sequence that is being decoded, up to a limit or a stop token, which is emitted.

    The limit counts the prompt, too.

    Raises:
        UserError: if the prompt is empty, or exceeds the target's context together with the
            continuation.
    """

    def __init__(
        self,
        target: FrozenTarget,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        generator: Random,
    ) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.token_ids = [*prompt_ids]
        self.limit = len(prompt_ids) + max_new_tokens
        if not prompt_ids or self.limit > target.max_length:
            raise UserError(
                "eval.max_new_tokens",
                got=f"a prompt of {len(prompt_ids)} tokens and {max_new_tokens} new ones",
                expected=(
                    "a prompt of at least 1 token that fits, together with the new tokens, into the"
                    f" target's context of {target.max_length} tokens"
                ),
            )
        self.generator = generator
        self.stop_ids = target.eos_token_ids
        self.rounds: list[Round] = []
        self.prefill_seconds = 0.0
        self.seconds = 0.0

    @property
    def stopped(self) -> bool:
        """Whether the last token is a stop token."""
        return self.token_ids[-1] in self.stop_ids

    @property
    def is_finished(self) -> bool:
        """Whether a stop token or the limit has ended the sequence."""
        return self.stopped or len(self.token_ids) == self.limit

    def commit(
        self,
        proposal: Proposal,
        path: Sequence[int],
        next_token: int,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """Append the tokens of a round to the sequence, and record the round.

        These are the accepted draft tokens and the next token, up to the length limit or the first
        stop token.

        Args:
            proposal: the draft tokens.
            path: indices of the accepted draft tokens.
            next_token: the target's token after the accepted ones.
            draft_seconds: this sequence's share of the time to propose.
            verify_seconds: this sequence's share of the time to verify.
        """
        tokens = proposal.tokens
        emitted = []
        for token in [*(tokens[node] for node in path), next_token]:
            emitted.append(token)
            if token in self.stop_ids or len(self.token_ids) + len(emitted) == self.limit:
                break
        self.token_ids += emitted

        # Of a tree only one path is recorded: the accepted nodes, and after them first children.
        drafted = tuple(tokens)
        if proposal.tree:
            drafted = tuple(tokens[node] for node in proposal.tree.extend_to_leaf(path))
        self.rounds.append(
            Round(
                drafted=drafted,
                # Accepted tokens after a stop token or the limit do not count.
                num_accepted=min(len(path), len(emitted)),
                emitted=tuple(emitted),
                draft_seconds=draft_seconds,
                verify_seconds=verify_seconds,
                num_off_path=len(tokens) - len(drafted),
            )
        )

    def to_generation(self) -> Generation:
        """Return the result of decoding: the new tokens, the rounds and the times."""
        return Generation(
            self.prompt_ids,
            tuple(self.token_ids[len(self.prompt_ids) :]),
            tuple(self.rounds),
            self.prefill_seconds,
            self.seconds,
            self.stopped,
        )
