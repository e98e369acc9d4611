"""On-policy data: the draft writes, the target scores (GKD, arXiv 2306.13649; DistillSpec, arXiv 2310.08461).

A draft that learns only from the target's text never sees the places its own mistakes lead to. A share of the batches therefore keeps
just the beginnings of its rows, and the draft writes on from there.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdistill.data.batch_generate import GenerationOptions, generate, generation_mode


@dataclass(frozen=True)
class OnPolicyGeneration:
    """Replaces a `fraction` of the batches. Lengths in tokens; `end_ids` end a text. The seed makes a run repeatable."""

    draft: PreTrainedModel
    fraction: float
    temperature: float
    prompt_tokens: int
    num_tokens: int
    end_ids: tuple[int, ...]
    seed: int

    def __call__(self, batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        """The batch with this `number` in the run, or what the draft writes after the beginnings of its rows.

        Rows whose first document is no longer than a beginning have nothing to continue: when all are, the batch stays.
        """
        if random.Random(self.seed * 1_000_003 + number).random() >= self.fraction:
            return batch
        first_document = (batch["document_ids"][:, : self.prompt_tokens + 1] == 0).all(1)
        prompts = batch["input_ids"][first_document, : self.prompt_tokens].tolist()
        if not prompts:
            return batch
        options = GenerationOptions(self.num_tokens, self.end_ids, self.seed * 1_000_003 + number)
        with generation_mode(self.draft, self.draft.dtype) as draft:
            texts = generate(draft, prompts, [self.temperature] * len(prompts), options, num_parts=1)
        return self._rows(prompts, texts, batch["input_ids"].device)

    def _rows(self, prompts: list[list[int]], texts: list[list[int]], device: torch.device) -> dict[str, Tensor]:
        """One document a row; only what was written is learnt from."""
        length = self.prompt_tokens + max(map(len, texts))
        rows: dict[str, list[list[int]]] = {"input_ids": [], "loss_mask": [], "document_ids": [], "position_ids": []}
        for prompt, text in zip(prompts, texts, strict=True):
            used = len(prompt) + len(text)
            padding = length - used
            rows["input_ids"].append(prompt + text + [0] * padding)
            rows["loss_mask"].append([0] * len(prompt) + [1] * len(text) + [0] * padding)
            rows["document_ids"].append([0] * used + [-1] * padding)
            rows["position_ids"].append([*range(used), *[0] * padding])
        return {name: torch.tensor(values, device=device) for name, values in rows.items()}
