"""On-policy data: the draft generates, the target scores (GKD, arXiv 2306.13649; DistillSpec, arXiv 2310.08461).

A draft that is trained on the target's completions alone never sees the prefixes that its own mistakes lead to. In a share of the
batches, therefore, the rows are cut to their first tokens and the draft generates the rest.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdistill.data.batch_generate import generate, generation_mode


@dataclass(frozen=True)
class OnPolicyGeneration:
    """Replaces a `fraction` of the batches. Lengths in tokens; `end_ids` end a completion. The seed makes a run repeatable."""

    draft: PreTrainedModel
    fraction: float
    temperature: float
    prompt_tokens: int
    num_tokens: int
    end_ids: tuple[int, ...]
    seed: int

    def __call__(self, batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        """The batch with this `number` in the run, or what the draft generates after the first tokens of its rows.

        Rows whose first document has at most `prompt_tokens` have nothing to continue; a batch of such rows alone is returned as it is.
        """
        if random.Random(self.seed * 1_000_003 + number).random() >= self.fraction:
            return batch
        first_document = (batch["document_ids"][:, : self.prompt_tokens + 1] == 0).all(1)
        prompts = batch["input_ids"][first_document, : self.prompt_tokens].tolist()
        if not prompts:
            return batch
        with generation_mode(self.draft, self.draft.dtype) as draft:
            completions = generate(
                draft,
                prompts,
                [self.temperature] * len(prompts),
                max_new_tokens=self.num_tokens,
                end_ids=self.end_ids,
                seed=self.seed * 1_000_003 + number,
                num_parts=1,
            )
        return self._rows(prompts, completions, batch["input_ids"].device)

    def _rows(self, prompts: list[list[int]], completions: list[list[int]], device: torch.device) -> dict[str, Tensor]:
        """One document a row; only generated tokens have a loss."""
        length = self.prompt_tokens + max(map(len, completions))
        rows: dict[str, list[list[int]]] = {"input_ids": [], "loss_mask": [], "document_ids": [], "position_ids": []}
        for prompt, completion in zip(prompts, completions, strict=True):
            used = len(prompt) + len(completion)
            padding = length - used
            rows["input_ids"].append(prompt + completion + [0] * padding)
            rows["loss_mask"].append([0] * len(prompt) + [1] * len(completion) + [0] * padding)
            rows["document_ids"].append([0] * used + [-1] * padding)
            rows["position_ids"].append([*range(used), *[0] * padding])
        return {name: torch.tensor(values, device=device) for name, values in rows.items()}
