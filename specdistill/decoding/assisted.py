"""A draft in transformers' own loop of assisted generation: `model.generate(…, custom_generate=draft)`.

Verification, logits processors, stopping criteria and KV cache are transformers'. So the output is that of `generate()` without a draft:
the same tokens when greedy, up to near-ties in rounding, and the same distribution when sampled. The loop hands a candidate generator token
ids and logits alone, so hooks keep the hidden states of the target's last pass. It drafts chains, for one sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.candidate_generator import CandidateGenerator

from specdistill.decoding.proposer import DecodingState, Proposer
from specdistill.decoding.sampling import GREEDY, Sampling
from specdistill.errors import UserError
from specdistill.targets.frozen import Features, FrozenTarget, capture

LAST = -1  # in place of a layer's number: the hidden state after the final norm


class DraftCandidates(CandidateGenerator):
    """A draft's tokens, up to `k` per round. captured: hidden states [1, T, D] of the target's last pass, by layer; hooks replace them."""

    def __init__(
        self, draft: "Draft", k: int, config: GenerationConfig, captured: dict[int, Tensor]
    ) -> None:
        self.proposer, self.device, self.k, self.captured = (
            draft.proposer,
            draft.target.device,
            k,
            captured,
        )
        self.max_length = config.max_length
        # Any distribution is verified exactly; processors of the target's logits other than these cost acceptance.
        of_draft = Sampling(
            config.temperature or 1.0,
            1.0 if config.top_p is None else config.top_p,
            config.top_k or 0,
        )
        self.sampling = of_draft if config.do_sample else GREEDY
        self.num_read = 0  # positions whose features the proposer has been given
        self.proposer.begin([config.max_length + k])

    def get_candidates(self, input_ids: Tensor, **_: Any) -> tuple[Any, Any]:
        """The sequence with its draft tokens, and logits [1, K, V] of what they were drawn from; None where each is certain."""
        token_ids = input_ids[0].tolist()
        k = min(self.k, self.max_length - len(token_ids) - 1)
        if not self.captured or k < 1:  # the target has to read the prompt first
            return input_ids, None
        num_fresh = len(token_ids) - 1 - self.num_read
        self.num_read += num_fresh
        *aux, last = (
            self.captured[layer].to(self.device) for layer in (*self.proposer.aux_layers, LAST)
        )
        state = DecodingState(
            [token_ids], Features(tuple(aux), last), [num_fresh]
        )  # what was committed since the last draft
        (proposal,) = self.proposer.propose(state, k, self.sampling, [None])
        if not proposal.tokens:
            return input_ids, None
        logits = None if proposal.probabilities is None else proposal.probabilities[None].log()
        return torch.cat((input_ids, input_ids.new_tensor([proposal.tokens])), dim=1), logits


@dataclass(frozen=True)
class Draft:
    """A draft of a method and the target that it drafts for. In transformers' loop: `model.generate(…, custom_generate=draft)`."""

    method: str
    proposer: Proposer
    target: FrozenTarget

    def __call__(
        self, model: Any, input_ids: Tensor, num_speculative_tokens: int = 4, **generating: Any
    ) -> Any:
        """What `generate()` runs in place of its own loop, with all that it has prepared."""
        target, cache = self.target, generating.get("past_key_values")
        is_begun = input_ids.shape[1] == 0 or (cache is not None and cache.get_seq_length() > 0)
        for found, got, expected in (
            (
                model is not target.model,
                "a draft of another model",
                "load_draft(…, model) with this model",
            ),
            (
                target.is_recurrent,
                f"{target.name}, whose recurrent layers cannot forget tokens",
                "specdistill.generate for it",
            ),
            (
                self.proposer.reader,
                "a draft that runs layers of its target",
                "specdistill.generate for it",
            ),
            (
                is_begun,
                "inputs_embeds, or tokens in a cache",
                "input_ids of the whole text, which the draft reads, too",
            ),
        ):
            if found:
                raise UserError("custom_generate", got=got, expected=expected)

        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            captured[LAST] = output.last_hidden_state

        with (
            capture(target.layers, self.proposer.aux_layers) as captured,
            target.backbone.register_forward_hook(keep),
        ):
            candidates = DraftCandidates(
                self, num_speculative_tokens, generating["generation_config"], captured
            )
            model._get_candidate_generator = lambda **_: (
                candidates
            )  # hides its class's, which makes others
            try:
                return type(model)._assisted_decoding(model, input_ids, **generating)
            finally:
                del model._get_candidate_generator
