"""DSpark (arXiv 2607.05147): a block drafter that corrects its logits and states its confidence.

Shapes: N blocks, B rows or nodes, K slots, H hidden size, V target vocabulary, W draft vocabulary,
E markov_rank.

A slot's logits are corrected by the tokens before it. All slots predict (`sample_from_anchor`).
With h_k a slot's hidden state, U_k its logits, x the token before it and e = W1[x]:

    vanilla     logits_k = U_k + W2 e
    gated       logits_k = U_k + W2 (sigmoid(gate_proj [h_k ; e]) * e)
    rnn         logits_k = U_k + W2 tanh(o)
                g, c, o = joint_proj [s ; e ; h_k]
                s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)
    confidence  c_k = sigmoid(proj [h_k ; e])

The state s of the rnn is 0 at the anchor, and s' is the state of the next slot. Each slot's
distribution is that of a chain, given the tokens before it, so verification is exact.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from specdistill.methods.blocks.module import BlockConfig, BlockDraft


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    """The shape and the switches of a DSpark drafter.

    Attributes:
        sample_from_anchor: whether the first position of a block predicts, too. It holds the known
            token at which the block begins, the anchor.
        markov_rank: E, the rank of the correction, by which the token before a position changes its
            logits.
        markov_head_type: the kind of the correction (see the module).
        enable_confidence_head: whether the drafter states its confidence.
        confidence_head_with_markov: whether the confidence head also reads the correction's
            embedding of the token before.
    """

    sample_from_anchor: bool = True
    markov_rank: int
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True


class MarkovHead(nn.Module):
    """The correction of a slot's logits by the token before the slot, of rank E.

    A slot is a position of the drafted block. `step` and `forward` compute a correction of width E.
    The caller multiplies it by markov_w2 [W, E] and adds the product to the logits.
    """

    def __init__(self, config: DSparkConfig) -> None:
        """Create the layers that this kind of correction needs."""
        super().__init__()
        # W1 embeds the token before with E numbers, and W2 turns E numbers into corrections of all
        # logits. The other layers exist only for their kind (see the equations in the module).
        rank = config.markov_rank
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    @torch.no_grad()
    def initialize_from_target(self, embedding_VH: Tensor, head_WH: Tensor) -> None:
        """Initialize the correction from the target, so that it changes no logits at first.

        The correction adds `markov_w2` c to the logits of a slot. The vector c of E numbers comes
        from `markov_w1`, the embedding of the token before the slot. It is this embedding itself
        (vanilla), a gate times the embedding (gated), or the output of an rnn that reads it.

        Args:
            embedding_VH: [V, H], the target's embedding.
            head_WH: [W, H], the rows of the target's LM head for the draft's W tokens.
        """
        # The first E right singular vectors of the head are the directions of hidden states that
        # change the logits most. `markov_w1` gets the target's embedding in these directions,
        # scaled to a root mean square of 1. If the head has fewer than E directions, the other
        # columns stay random.
        rank = self.markov_w1.embedding_dim
        width = min(rank, *head_WH.shape)
        directions_HE = torch.linalg.svd(head_WH.float(), full_matrices=False).Vh[:width].T
        embedded_VE = embedding_VH.float() @ directions_HE
        self.markov_w1.weight[:, :width] = embedded_VE / embedded_VE.square().mean().sqrt()

        # Make the product of `markov_w2` and c zero by making one of the two zero. The other must
        # not be zero, because the first would then get no gradient.
        if self.kind == "rnn":
            # c is the tanh of the last E outputs of `joint_proj`. Make these outputs zero.
            self.markov_w2.weight[:, :width] = head_WH.float() @ directions_HE
            self.joint_proj.weight[-rank:] = 0
            self.joint_proj.bias.zero_()
        else:
            self.markov_w2.weight.zero_()

    def start(self, hidden_BKH: Tensor) -> Tensor:
        """Return the state before the first slot: zeros [B, E], for B rows and rank E."""
        return hidden_BKH.new_zeros(len(hidden_BKH), self.markov_w1.embedding_dim)

    def step(
        self, hidden_BH: Tensor, previous_ids_B: Tensor, state_BE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the correction of one slot from its hidden state and the token before it.

        A slot is a position of the drafted block. The equations of the three kinds of correction
        are at the top of this file.

        Args:
            hidden_BH: [B, H], the slot's hidden states.
            previous_ids_B: [B], the tokens before the slot.
            state_BE: [B, E], the state before the slot.

        Returns:
            The correction, which the caller multiplies by markov_w2 and adds to the logits; the
            embedding of the token before; and the state after the slot (only the rnn changes it).
            Each is [B, E].
        """
        # vanilla: the embedding e itself. gated: e times a gate that reads the hidden state, too.
        embedded: Tensor = self.markov_w1(previous_ids_B)
        if self.kind == "vanilla":
            return embedded, embedded, state_BE
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat((hidden_BH, embedded), -1)).sigmoid()
            return gate * embedded, embedded, state_BE

        # rnn: one projection gives the gate, the candidate of the next state, and the output.
        joint = self.joint_proj(torch.cat((state_BE, embedded, hidden_BH), -1))
        gate, candidate, output = joint.chunk(3, -1)
        gate = gate.sigmoid()
        correction_BE = output.tanh()
        next_state_BE = gate * state_BE + (1 - gate) * candidate.tanh()
        return correction_BE, embedded, next_state_BE

    def forward(self, hidden_NKH: Tensor, previous_ids_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the corrections of all slots in training, where every token is known.

        A slot is a position of a block at which the draft predicts a token. Its correction changes
        the logits of this prediction: the caller multiplies it by markov_w2, and adds the product.

        Args:
            hidden_NKH: [N, K, H], the hidden states of the K slots of N blocks.
            previous_ids_NK: [N, K], the token before each slot.

        Returns:
            The corrections, and the embeddings of the tokens before the slots. Each is [N, K, E],
            where E is the rank of the correction.
        """
        # Go through the slots in order. A correction of kind rnn depends on a state, which each
        # slot passes on to the next; the other kinds leave the state as it is.
        state_NE = self.start(hidden_NKH)
        outputs_by_slot = []
        for hidden_NH, previous_N in zip(
            hidden_NKH.unbind(1), previous_ids_NK.unbind(1), strict=True
        ):
            correction_NE, embedded_NE, state_NE = self.step(hidden_NH, previous_N, state_NE)
            outputs_by_slot.append((correction_NE, embedded_NE))

        # Stack the K results of each kind.
        corrections, embedded = (
            torch.stack(part, 1) for part in zip(*outputs_by_slot, strict=True)
        )
        return corrections, embedded


class ConfidenceHead(nn.Module):
    """A linear layer that estimates the chance that a draft token is accepted, as logits."""

    def __init__(self, config: DSparkConfig) -> None:
        """Create the linear layer, which may also read the embedding of the token before."""
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + config.markov_rank * self.with_markov, 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Estimate the chance that each draft token is accepted.

        Args:
            hidden: [..., H], the hidden states from which the draft tokens are predicted.
            embedded: [..., E], the embeddings of the tokens before the draft tokens. Only read if
                `with_markov` is true (`confidence_head_with_markov` in the config).

        Returns:
            The logits of the chances, of the shape of `hidden` without its last axis. The sigmoid
            of a logit is the chance.
        """
        inputs = torch.cat((hidden, embedded), -1) if self.with_markov else hidden
        chance_logits: Tensor = self.proj(inputs).squeeze(-1)
        return chance_logits


class DSparkDraft(BlockDraft):
    """A block drafter with a correction and, if the config says so, a confidence head."""

    def __init__(self, config: DSparkConfig) -> None:
        """Create a block drafter, and add the correction and the confidence head."""
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
