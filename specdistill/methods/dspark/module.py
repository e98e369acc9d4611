"""DSpark (arXiv 2607.05147): a block drafter whose logits are corrected by the tokens before a slot, and that states its confidence.

Shapes: N blocks, B rows or nodes, K slots, H hidden size, V target vocabulary, W draft vocabulary, E markov_rank.

All slots predict (`sample_from_anchor`). With h_k a slot's hidden state, U_k its logits and x the token before it, e = W1[x]:

    vanilla     logits_k = U_k + W2 e
    gated       logits_k = U_k + W2 (sigmoid(gate_proj [h_k ; e]) * e)
    rnn         g, c, o = joint_proj [s ; e ; h_k];  s' = σ(g) s + (1 - σ(g)) tanh(c);  logits_k = U_k + W2 tanh(o);  s = 0 at the anchor
    confidence  c_k = sigmoid(proj [h_k ; e])

Each slot's distribution is that of a chain: given the tokens before it, so verification is exact.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from specdistill.methods.blocks.module import BlockConfig, BlockDraft


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    sample_from_anchor: bool = True
    markov_rank: int
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True


class MarkovHead(nn.Module):
    """The correction, of rank E: the products of markov_w2 [W, E] with what `step` and the call return are added to the logits."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, self.kind = config.markov_rank, config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    @torch.no_grad()
    def begin(self, embedding_VH: Tensor, head_WH: Tensor) -> None:
        """Before training, by the target's embedding and rows of its head: tokens begin as the target has them, in the directions in which
        its head differs most, and nothing is corrected.
        """
        width = min(self.markov_w1.embedding_dim, *head_WH.shape)
        directions_HE = torch.linalg.svd(head_WH.float(), full_matrices=False).Vh[:width].T
        embedded_VE = embedding_VH.float() @ directions_HE
        self.markov_w1.weight[:, :width] = embedded_VE / embedded_VE.square().mean().sqrt()
        if self.kind == "rnn":
            self.markov_w2.weight[:, :width] = head_WH.float() @ directions_HE
            self.joint_proj.weight[-self.markov_w1.embedding_dim :] = 0  # of its output
            self.joint_proj.bias.zero_()
        else:
            self.markov_w2.weight.zero_()

    def start(self, hidden_BKH: Tensor) -> Tensor:
        """The state [B, E] before the first slot."""
        return hidden_BKH.new_zeros(len(hidden_BKH), self.markov_w1.embedding_dim)

    def step(
        self, hidden_BH: Tensor, previous_ids_B: Tensor, state_BE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One slot: what is multiplied and the token's embedding, [B, E] each, and the state after it."""
        embedded: Tensor = self.markov_w1(previous_ids_B)
        if self.kind == "vanilla":
            return embedded, embedded, state_BE
        if self.kind == "gated":
            return (
                self.gate_proj(torch.cat((hidden_BH, embedded), -1)).sigmoid() * embedded,
                embedded,
                state_BE,
            )
        gate, candidate, output = self.joint_proj(
            torch.cat((state_BE, embedded, hidden_BH), -1)
        ).chunk(3, -1)
        kept = gate.sigmoid()
        return output.tanh(), embedded, kept * state_BE + (1 - kept) * candidate.tanh()

    def forward(self, hidden_NKH: Tensor, previous_ids_NK: Tensor) -> tuple[Tensor, Tensor]:
        """All slots, the token before each being known: the same two [N, K, E]."""
        state_NE, found = self.start(hidden_NKH), []
        for hidden_NH, previous_N in zip(
            hidden_NKH.unbind(1), previous_ids_NK.unbind(1), strict=True
        ):
            correction_NE, embedded_NE, state_NE = self.step(hidden_NH, previous_N, state_NE)
            found.append((correction_NE, embedded_NE))
        corrections, embedded = (torch.stack(part, 1) for part in zip(*found, strict=True))
        return corrections, embedded


class ConfidenceHead(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + config.markov_rank * self.with_markov, 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        logits: Tensor = self.proj(
            torch.cat((hidden, embedded), -1) if self.with_markov else hidden
        ).squeeze(-1)
        return logits


class DSparkDraft(BlockDraft):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
