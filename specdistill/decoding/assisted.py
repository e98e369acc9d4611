"""Use a draft in transformers' `generate()`: `model.generate(…, custom_generate=draft)`.

Each round drafts a chain, reads it in one pass of the target, and then goes through its positions
as `generate()` goes through its steps. For each emitted token it calls the logits processors,
chooses a token, and calls the stopping criteria and the streamer, in this order. So all of them do
what they do without a draft, even if they have a state of their own. A text that ends inside a
proposal ends there.

The output equals that of `generate()` without a draft: the same tokens when greedy, up to
near-ties, and the same distribution when sampled. A draft whose tokens are certain, such as a
lookup, also uses the same random numbers, so the same seed gives the same text. Hooks collect the
hidden states that heads read. One sequence at a time, and chains only.

Shapes: N positions of one pass, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, GenerationMixin, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdistill.common.errors import UserError
from specdistill.decoding.decoder import verify_sampled
from specdistill.decoding.proposer import DecodingState, Proposal, Proposer
from specdistill.decoding.sampling import GREEDY, Sampling
from specdistill.targets.frozen import Features, FrozenTarget, capture

ONE_SEQUENCE_HINT = "1: a draft continues one sequence"
OTHER_MODE = (
    "None: a draft needs greedy search or sampling; leave custom_generate out for other modes"
)
TWO_DRAFTS_HINT = "None: custom_generate is the draft; leave one of the two out"
OTHER_LENGTH = "its default: num_speculative_tokens says how much custom_generate drafts"
STEP_OUTPUTS = (
    "False: one pass computes several steps; leave custom_generate out to get what each step"
    " computes"
)
# Options of generate() that a draft does not support unless they have their default value, and what
# is expected instead.
UNSUPPORTED_OPTIONS = {
    "num_beams": ONE_SEQUENCE_HINT,
    "num_beam_groups": ONE_SEQUENCE_HINT,
    "num_return_sequences": ONE_SEQUENCE_HINT,
    "constraints": OTHER_MODE,
    "force_words_ids": OTHER_MODE,
    "penalty_alpha": OTHER_MODE,
    "dola_layers": OTHER_MODE,
    "diversity_penalty": OTHER_MODE,
    "assistant_model": TWO_DRAFTS_HINT,
    "assistant_tokenizer": TWO_DRAFTS_HINT,
    "assistant_early_exit": TWO_DRAFTS_HINT,
    "assistant_ensemble_weight": TWO_DRAFTS_HINT,
    "is_assistant": TWO_DRAFTS_HINT,
    "prompt_lookup_num_tokens": TWO_DRAFTS_HINT,
    "max_matching_ngram_size": TWO_DRAFTS_HINT,
    "use_mtp": TWO_DRAFTS_HINT,
    "speculation_type": TWO_DRAFTS_HINT,
    "num_assistant_tokens": OTHER_LENGTH,
    "num_assistant_tokens_schedule": OTHER_LENGTH,
    "assistant_confidence_threshold": OTHER_LENGTH,
    "assistant_lookbehind": OTHER_LENGTH,
    "target_lookbehind": OTHER_LENGTH,
    "output_attentions": STEP_OUTPUTS,
    "output_hidden_states": STEP_OUTPUTS,
    "use_cache": "True: rejected draft tokens are removed from a KV cache",
    "cache_implementation": "None: rejected draft tokens are removed from a dynamic cache",
    "compile_config": "None: passes of different lengths are not compiled",
    "continuous_batching_config": "None: a draft continues one sequence",
    "synced_gpus": "False: a draft does not wait for other processes; leave custom_generate out",
}
DEFAULTS = GenerationConfig._get_default_generation_params() | {"cache_implementation": "dynamic"}


@dataclass
class Continuation:
    """The sequence that `generate()` continues.

    Attributes:
        input_ids: [1, tokens], prompt and new tokens.
        details: `scores` and `logits`, as far as `generate()` must return them. Each is a tuple of
            tensors [1, V], one for each new token.
        is_finished: whether a stopping criterion has ended the text.
    """

    input_ids: Tensor
    logits_processor: Callable[..., Tensor]
    stopping_criteria: StoppingCriteriaList
    streamer: BaseStreamer | None
    do_sample: bool | None
    details: dict[str, Any]
    is_finished: bool = False

    def extend(self, logits_1NV: Tensor, proposal: Proposal) -> int:
        """Append the accepted draft tokens and one token after them to the text.

        Stops earlier if a stopping criterion of `generate()` ends the text.

        Args:
            logits_1NV: the target's logits [1, N, V] after the last token of the text and after
                each of the N - 1 draft tokens.
            proposal: the draft tokens.

        Returns:
            The number of appended tokens.
        """
        # At each position the target's token is appended. If it differs from the draft token, the
        # later draft tokens are rejected. None stands for the position after all draft tokens.
        for index, draft_token in enumerate([*proposal.tokens, None]):
            # Process a copy of the logits, as generate() does: some processors change their input.
            logits_1V = logits_1NV[:, index].to(
                copy=True, dtype=torch.float32, device=self.input_ids.device
            )
            scores_1V = self.logits_processor(self.input_ids, logits_1V)

            # Choose and emit a token.
            if self.do_sample:
                token_1 = choose_token(scores_1V, proposal, index)
            else:
                token_1 = scores_1V.argmax(-1)
            # The scores and logits that generate() returns if asked to.
            step = {"scores": scores_1V, "logits": logits_1V}
            for name in self.details:
                self.details[name] += (step[name],)
            self.input_ids = torch.cat((self.input_ids, token_1.unsqueeze(0)), dim=1)

            # Stop where a criterion ends the text, or where the draft token was rejected.
            self.is_finished = bool(
                self.stopping_criteria(self.input_ids, self.details.get("scores")).all()
            )
            if self.streamer is not None:
                self.streamer.put(token_1.cpu())
            if self.is_finished or int(token_1) != draft_token:
                break
        return index + 1


def choose_token(scores_1V: Tensor, proposal: Proposal, index: int) -> Tensor:
    """Return the token [1] that the target samples at one position of a proposal.

    The token follows the target's distribution. It equals the draft token as often as possible: by
    the rule of speculative sampling.

    Args:
        scores_1V: the target's processed logits at the position.
        proposal: the draft tokens.
        index: the position's number: i for the draft token i; the number of draft tokens for the
            position after the last of them.
    """
    probs_1V = scores_1V.softmax(-1)
    # Without a draft distribution to correct for, draw from the target as generate() itself does,
    # with the same random numbers. So the same seed gives the same text as without a draft.
    if proposal.probabilities is None or index == len(proposal.tokens):
        return torch.multinomial(probs_1V, num_samples=1).squeeze(1)
    tested = Proposal(
        proposal.tokens[index : index + 1],
        proposal.probabilities[index : index + 1].to(probs_1V.device),
    )
    # Test this draft token alone, as a proposal of one token. verify_sampled needs two rows of
    # target distributions: one for the draft token, and one for the token after it. The second row
    # only repeats the first, because the token after an accepted one is not used: the next call
    # draws it. If the draft token is rejected, `path` is empty, and `other_token` replaces it.
    path, other_token = verify_sampled(
        tested,
        probs_1V.expand(2, -1),
        generator=None,  # torch's default generator, which generate() uses, too
    )
    token = proposal.tokens[index] if path else other_token
    return torch.tensor([token], device=probs_1V.device)


@dataclass(frozen=True)
class Draft:
    """A draft and its target, for transformers' `generate()`: `custom_generate=draft`."""

    method: str
    proposer: Proposer
    target: FrozenTarget

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        num_speculative_tokens: int = 4,
        *,
        generation_config: GenerationConfig,
        logits_processor: Callable[..., Tensor],
        stopping_criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None = None,
        synced_gpus: bool = False,
        # Not used here: generate() itself has read it, for stop strings and token healing.
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Generate with the draft, in place of the decoding loop of `generate()`.

        `generate()` has prepared the arguments.

        Raises:
            UserError: for options that a draft does not support.
        """
        self._check(
            model,
            input_ids,
            num_speculative_tokens,
            {**vars(generation_config), **model_kwargs, "synced_gpus": synced_gpus},
        )
        cache = model_kwargs["past_key_values"]
        # Layers with a window must keep the tokens that rejected draft tokens push out of it.
        cache.activate_past_recording()
        max_length = stopping_criteria.max_length
        assert max_length is not None  # generate() always sets one
        self.proposer.begin([max_length + num_speculative_tokens])
        sampling = select_sampling(generation_config)
        text = Continuation(
            input_ids,
            logits_processor,
            stopping_criteria,
            streamer,
            do_sample=generation_config.do_sample,
            details=prepare_details(generation_config),
        )

        # Read the prompt. Its logits choose the first token, so there is no draft token yet.
        outputs, features = self._read(
            partial(model._prefill, input_ids, generation_config, model_kwargs)
        )
        model_kwargs.pop("logits_to_keep", None)  # this argument is for the prompt only
        proposal = Proposal([])
        while True:
            # Emit the accepted draft tokens and one more token. Forget the draft tokens that were
            # rejected or lie behind the end of the text.
            num_emitted = text.extend(outputs.logits[:, -1 - len(proposal.tokens) :], proposal)
            num_rejected = 1 + len(proposal.tokens) - num_emitted
            cache.crop(-num_rejected)
            if text.is_finished:
                break
            model_kwargs = extend_inputs(model, outputs, model_kwargs, num_emitted)

            # Draft. The last token that `generate()` may emit needs no draft token.
            features = features.first(features.last_hidden.shape[1] - num_rejected)
            proposal = Proposal([])
            num_drafted = min(num_speculative_tokens, max_length - text.input_ids.shape[1] - 1)
            if num_drafted:
                state = DecodingState(
                    [text.input_ids[0].tolist()], features, [features.last_hidden.shape[1]]
                )
                (proposal,) = self.proposer.propose(state, num_drafted, sampling, [None])

            # Read the last token and the draft tokens in one pass of the target. Only a copy of
            # `model_kwargs` is extended by the draft tokens, because they may be rejected.
            draft_ids = input_ids.new_tensor([proposal.tokens])
            inputs = model.prepare_inputs_for_generation(
                torch.cat((text.input_ids, draft_ids), dim=1),
                next_sequence_length=1 + len(proposal.tokens),
                **extend_inputs(model, outputs, dict(model_kwargs), len(proposal.tokens)),
            )
            outputs, features = self._read(partial(model, **inputs, return_dict=True))

        # Return what generate() returns with these options.
        if streamer is not None:
            streamer.end()
        if not generation_config.return_dict_in_generate:
            return text.input_ids
        return GenerateDecoderOnlyOutput(
            **{"sequences": text.input_ids, "past_key_values": cache, **text.details}
        )

    def _check(self, model: Any, input_ids: Tensor, k: int, options: Mapping[str, Any]) -> None:
        """Check that a draft supports the options and inputs of this call of `generate()`.

        Args:
            model: the model whose `generate()` was called.
            input_ids: token ids of the prompts [B, tokens].
            k: `num_speculative_tokens`, the draft tokens of a round.
            options: the generation config and the other arguments of `generate()`.

        Raises:
            UserError: for an option or an input that a draft does not support.
        """
        # An option that is absent or has its default value changes nothing. For options that
        # DEFAULTS does not list, such as `synced_gpus`, False counts as the default.
        for name, expected in UNSUPPORTED_OPTIONS.items():
            value = options.get(name)
            if value not in (None, DEFAULTS.get(name, False)):
                raise UserError(name, got=f"{value!s:.60}", expected=expected)

        # The model and the draft. These errors name the argument that holds the draft.
        key = "custom_generate"
        if model is not self.target.model:
            raise UserError(
                key,
                got="a draft of another model",
                expected="one from load_draft(…, model)",
            )
        if self.target.is_recurrent:
            raise UserError(
                key,
                got="a target with recurrent layers",
                expected="specdistill.generate, which supports such a target",
            )
        if self.proposer.reader:
            raise UserError(
                key,
                got="a draft that runs layers of its target",
                expected="specdistill.generate, which supports such a draft",
            )
        if getattr(self.proposer, "tree", None):
            raise UserError(
                key,
                got="a draft with draft_tree",
                expected="specdistill.generate, which supports such a draft",
            )

        # The inputs
        cache = options.get("past_key_values")
        if input_ids.shape[1] == 0 or (cache is not None and cache.get_seq_length() > 0):
            raise UserError(
                key,
                got="inputs_embeds, or tokens in a cache",
                expected="input_ids of the whole text, and no cache or an empty one",
            )
        if not isinstance(cache, DynamicCache):
            raise UserError(
                "past_key_values", got=type(cache).__name__, expected="a DynamicCache, or none"
            )
        if len(input_ids) > 1:
            raise UserError(
                "input_ids",
                got=f"{len(input_ids)} sequences",
                expected="1: call generate() for each, without padding",
            )
        if type(k) is not int or k < 1:
            raise UserError("num_speculative_tokens", got=k, expected="a whole number from 1")

    def _read(self, run_pass: Callable[[], Any]) -> tuple[Any, Features]:
        """Run the target, and capture the hidden states that the draft reads.

        The model's own outputs do not hold them, so hooks on its modules store them.

        Args:
            run_pass: calls the model. It may read a long prompt in several forward passes.

        Returns:
            The outputs of the model, and the features of all tokens that it read.
        """
        chunks: list[Features] = []

        def keep_features(_module: Any, _inputs: Any, output: Any) -> None:
            """Store the hidden states of one forward pass: auxiliary layers, then the last.

            torch calls this after each forward pass of the target's backbone. `captured` then holds
            the outputs of the auxiliary layers of this pass, which may be on other devices.
            """
            tensors = [
                *(captured[layer] for layer in self.proposer.aux_layers),
                output.last_hidden_state,
            ]
            chunks.append(
                Features.from_tensors(tensor.to(self.target.device) for tensor in tensors)
            )

        hooks = self.target.backbone.register_forward_hook(keep_features)
        with capture(self.target.layers, self.proposer.aux_layers) as captured, hooks:
            outputs = run_pass()
        return outputs, Features.concatenate(chunks)


def select_sampling(generation_config: GenerationConfig) -> Sampling:
    """Return the settings by which the draft chooses its tokens.

    The draft knows temperature, top-p and top-k only. Other logits processors cost acceptance, but
    the output stays exact.
    """
    if not generation_config.do_sample:
        return GREEDY
    # In the config of `generate()` a setting may be None. It then gets the value without effect.
    return Sampling(
        generation_config.temperature or 1.0,
        generation_config.top_p or 1.0,
        generation_config.top_k or 0,
    )


def prepare_details(generation_config: GenerationConfig) -> dict[str, Any]:
    """Return an empty tuple for each of scores and logits that `generate()` must return.

    Each emitted token appends its own scores and logits.
    """
    details: dict[str, Any] = {}
    if generation_config.return_dict_in_generate:
        for name in ("scores", "logits"):
            if getattr(generation_config, f"output_{name}"):
                details[name] = ()
    return details


def extend_inputs(
    model: Any, outputs: Any, model_kwargs: dict[str, Any], num_tokens: int
) -> dict[str, Any]:
    """Extend the attention mask and position ids in `model_kwargs` by `num_tokens` new tokens.

    The model's own method, which changes `model_kwargs` in place, is called once for each token, as
    in the steps of `generate()`.

    Args:
        model: the target.
        outputs: what its last pass returned.
        model_kwargs: the arguments for its next pass.
        num_tokens: how many tokens were added.
    """
    for _ in range(num_tokens):
        model_kwargs = model._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder=False
        )
    return model_kwargs


# transformers 5.23 does not pass `tokenizer` and `streamer` on to callables: stop strings would
# raise, and nothing would be streamed.
extract_arguments = GenerationMixin._extract_generation_mode_kwargs


def extract_all_arguments(model: Any, custom_generate: Any, *arguments: Any) -> dict[str, Any]:
    """Select the arguments for the decoding loop of `generate()`, or for a `Draft` in its place.

    This function replaces a method of transformers, which it calls as `extract_arguments`. For a
    callable in place of the loop, that method selects only the callable's own arguments, without
    those of the loop such as `streamer`. A `Draft` is a callable that needs both kinds. So the
    method is called twice for it, once as if there were no callable. In all other cases the result
    is that of the method.

    Args:
        model: the model whose `generate()` was called.
        custom_generate: the callable, such as a `Draft`. None: `generate()` runs its own loop.
        arguments: the other arguments of the method, which are passed on to it.
    """
    loop_arguments = {}
    if isinstance(custom_generate, Draft):
        loop_arguments = extract_arguments(model, None, *arguments)
    return loop_arguments | extract_arguments(model, custom_generate, *arguments)


GenerationMixin._extract_generation_mode_kwargs = extract_all_arguments  # type: ignore[assignment, method-assign]
