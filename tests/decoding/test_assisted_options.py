"""Every option of `generate()` gives the same tokens with a draft, or is refused by its name."""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from specdistill.decoding.assisted import UNSUPPORTED_OPTIONS, Draft
from specdistill.decoding.proposer import Proposer
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.targets.frozen import FrozenTarget
from tests.proposers import behind_lookup, proposer_of
from tests.refusals import refused
from tests.tiny import qwen, tiny_target_model, tiny_tokenizer

# Eight tokens, so that even random drafts are sometimes accepted: four special ones and !"#$.
VOCABULARY = 8
PROMPTS = ((5, 4, 5, 4, 7, 3), (1, 2, 3, 4), (6,), (0, 7, 0, 7, 0, 7, 1, 1, 1, 1, 1, 1))
LENGTH = 16
QUICK_METHODS = ("eagle3", "dspark", "suffix", "all accepted")
METHODS = (
    *QUICK_METHODS,
    "draft_model",
    "pard",
    "eagle",
    "mtp",
    "dflash",
    "ngram",
    "ngram+eagle3",
    "ngram+dspark",
)


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    model = tiny_target_model(num_layers=2, vocab_size=VOCABULARY)
    model.generation_config.eos_token_id = []
    return FrozenTarget(model, tiny_tokenizer(), name="tiny")


def build_proposer(method: str, target: FrozenTarget) -> Proposer:
    if method == "all accepted":
        return DraftModelProposer(target.model)
    if method not in ("draft_model", "pard"):
        return proposer_of(method, target)
    model = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return DraftModelProposer(model, mask_token_id=2 if method == "pard" else None)


@pytest.fixture(scope="module")
def draft_of(target: FrozenTarget) -> Callable[[str], Draft]:
    """A function that returns the draft of a method, which is loaded once.

    Each test continues with the state that earlier tests left.
    """
    drafts: dict[str, Draft] = {}

    def draft(method: str) -> Draft:
        if method not in drafts:
            drafts[method] = Draft(method, build_proposer(method, target), target)
        return drafts[method]

    return draft


class StopsAtLength(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return torch.tensor([input_ids.shape[1] >= self.length])


class StopsAtCall(StoppingCriteria):
    """A criterion with a state, which returns a plain bool, as transformers allows."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self.num_calls -= 1
        return self.num_calls == 0


class StopsAtRepeat(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return (input_ids[:, -1] == 5) & (input_ids == 5).sum(1).gt(3)


class StopsByScores(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return torch.tensor(
            [
                len(scores) > 4
                and float(scores[-1][0, int(input_ids[0, -1])]) == float(scores[-1].max())
            ]
        )


class EndsAtCall(LogitsProcessor):
    """A processor with a state, which writes into the scores: token 0 wins at one call only."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        self.num_calls -= 1
        scores[:, 0] = 100.0 if self.num_calls == 0 else -100.0
        return scores


class PrefersUnseen(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        return scores - 3.0 * torch.bincount(input_ids[0, -4:], minlength=scores.shape[1])


def healing_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token  # which transformers needs there
    return tokenizer


def make_criteria(*criteria: StoppingCriteria) -> StoppingCriteriaList:
    return StoppingCriteriaList(criteria)


# Functions, because some options have a state and are created anew for each call.
STOPS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "a criterion of length": lambda: {"stopping_criteria": make_criteria(StopsAtLength(13))},
    "a criterion of tokens": lambda: {"stopping_criteria": make_criteria(StopsAtRepeat())},
    "a criterion with a state": lambda: {"stopping_criteria": make_criteria(StopsAtCall(11))},
    "a criterion of scores": lambda: {
        "stopping_criteria": make_criteria(StopsByScores()),
        "return_dict_in_generate": True,
        "output_scores": True,
    },
    "several criteria": lambda: {
        "stopping_criteria": make_criteria(StopsAtCall(17), StopsAtRepeat()),
        "eos_token_id": 7,
    },
    "a longer max length as a criterion": lambda: {
        "max_new_tokens": 5,
        "stopping_criteria": make_criteria(MaxLengthCriteria(19)),
    },
    "a shorter max length as a criterion": lambda: {
        "stopping_criteria": make_criteria(MaxLengthCriteria(2))
    },
    "a stop string": lambda: {"stop_strings": '"', "tokenizer": tiny_tokenizer()},
    "stop strings over two tokens": lambda: {
        "stop_strings": ["#$", '""', "$"],
        "tokenizer": tiny_tokenizer(),
    },
    "stop strings as a criterion": lambda: {
        "stopping_criteria": make_criteria(StopStringCriteria(tiny_tokenizer(), "#"))
    },
    "stop strings of a generation config": lambda: {
        "generation_config": GenerationConfig(stop_strings=["!", '""']),
        "tokenizer": tiny_tokenizer(),
    },
    "an end token": lambda: {"eos_token_id": 0},
    "end tokens": lambda: {"eos_token_id": [7, 0]},
    "end tokens of a generation config": lambda: {
        "generation_config": GenerationConfig(eos_token_id=[6, 2], max_length=20),
        "max_new_tokens": None,
    },
    "a least number of new tokens": lambda: {"eos_token_id": [1, 5], "min_new_tokens": 9},
    "a least length": lambda: {"eos_token_id": [1, 5], "min_length": 12},
    "a length": lambda: {"max_new_tokens": None, "max_length": 17},
    "both lengths": lambda: {"max_new_tokens": 9, "max_length": 17},
    "one token": lambda: {"max_new_tokens": 1},
    "two tokens": lambda: {"max_new_tokens": 2},
    "a time that does not pass": lambda: {"max_time": 3600.0, "eos_token_id": 7},
    "a time that is over": lambda: {"max_time": -1.0},
    "a forced end": lambda: {"forced_eos_token_id": [3], "eos_token_id": 3},
    "a forced beginning": lambda: {"forced_bos_token_id": 6, "eos_token_id": 0},
    "suppressed tokens": lambda: {"suppress_tokens": [2, 5], "eos_token_id": [5, 0]},
    "tokens suppressed at the beginning": lambda: {
        "begin_suppress_tokens": [2, 5, 1],
        "eos_token_id": 0,
    },
    "a penalty that grows": lambda: {
        "exponential_decay_length_penalty": (4, 1.4),
        "eos_token_id": 3,
    },
    "penalties": lambda: {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "eos_token_id": 0},
    "penalties of the prompt": lambda: {
        "encoder_repetition_penalty": 1.5,
        "encoder_no_repeat_ngram_size": 2,
    },
    "banned words": lambda: {
        "bad_words_ids": [[5, 1], [2]],
        "sequence_bias": {(6, 0): -9.0},
        "eos_token_id": 0,
    },
    "allowed tokens": lambda: {
        "prefix_allowed_tokens_fn": lambda _row, ids: [
            (int(ids[-1]) + 1) % 8,
            (int(ids[-1]) + 2) % 8,
        ]
    },
    "a processor with a state": lambda: {
        "logits_processor": LogitsProcessorList([EndsAtCall(9)]),
        "eos_token_id": 0,
    },
    "a processor of tokens": lambda: {
        "logits_processor": LogitsProcessorList([PrefersUnseen()]),
        "eos_token_id": 0,
    },
    "guidance": lambda: {"guidance_scale": 1.7, "eos_token_id": 0},
    "guidance by a prompt": lambda: {
        "guidance_scale": 1.7,
        "negative_prompt_ids": torch.tensor([[3, 1, 4]]),
    },
    "a watermark": lambda: {
        "watermarking_config": {"bias": 2.0, "seeding_scheme": "lefthash"},
        "eos_token_id": 0,
    },
    "a watermark with a state": lambda: {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3),
        "eos_token_id": 0,
    },
    "values made finite": lambda: {
        "remove_invalid_values": True,
        "renormalize_logits": True,
        "eos_token_id": 0,
    },
    "token healing": lambda: {
        "token_healing": True,
        "tokenizer": healing_tokenizer(),
        "eos_token_id": 0,
    },
    "a prompt in chunks": lambda: {"prefill_chunk_size": 3, "eos_token_id": 0},
    "a cache of the user": lambda: {"past_key_values": DynamicCache(), "eos_token_id": 0},
    "a cache by its name": lambda: {"cache_implementation": "dynamic", "eos_token_id": 0},
    "options without effect": lambda: {
        "length_penalty": 2.0,
        "early_stopping": True,
        "disable_compile": True,
    },
}


def generate_new_tokens(
    target: FrozenTarget, prompt: Sequence[int], options: dict[str, Any], **more: Any
) -> list[int]:
    options = {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0, **options, **more}
    output: Any = target.model.generate(torch.tensor([list(prompt)]), **options)
    sequences: Tensor = output.sequences if options.get("return_dict_in_generate") else output
    return list(sequences[0, len(prompt) :].tolist())


@pytest.fixture(scope="module")
def plain(target: FrozenTarget) -> Callable[[str, Sequence[int]], list[int]]:
    """A function that returns the tokens that `generate()` adds to a prompt without a draft."""
    return cache(lambda stop, prompt: generate_new_tokens(target, prompt, STOPS[stop]()))


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize(
    "methods",
    # Marked long: all methods and prompts take five seconds for each option.
    [
        pytest.param(QUICK_METHODS, id="quick"),
        pytest.param(METHODS, id="all", marks=pytest.mark.long),
    ],
)
def test_tokens_are_those_of_generate(
    target: FrozenTarget,
    plain: Any,
    draft_of: Callable[[str], Draft],
    stop: str,
    methods: tuple[str, ...],
) -> None:
    """All options, methods and prompts are combined."""
    for prompt, method in product(PROMPTS if methods == METHODS else PROMPTS[:1], methods):
        tokens = generate_new_tokens(
            target,
            prompt,
            STOPS[stop](),
            custom_generate=draft_of(method),
            num_speculative_tokens=5,
        )
        assert tokens == plain(stop, prompt), (method, prompt)


def test_most_options_end_the_text_early(plain: Any) -> None:
    """The combinations above test where a text ends."""
    lengths = [len(plain(stop, prompt)) for stop, prompt in product(STOPS, PROMPTS[:1])]
    assert sum(length < LENGTH for length in lengths) > len(lengths) / 2
    assert len(set(lengths)) > 7


@pytest.mark.parametrize("method", QUICK_METHODS)
def test_padding_in_front_of_a_prompt_changes_no_token(
    target: FrozenTarget, draft_of: Any, method: str
) -> None:
    padded = torch.tensor([[0, 0, 0, *PROMPTS[0]]])
    options = {
        "attention_mask": (torch.arange(9) > 2).long()[None],
        "max_new_tokens": LENGTH,
        "eos_token_id": 0,
    }
    expected = target.model.generate(padded, **options)
    assert torch.equal(
        target.model.generate(padded, custom_generate=draft_of(method), **options), expected
    )


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize(
    "stop", ["nothing", "stop strings over two tokens", "end tokens", "a processor with a state"]
)
def test_a_lookup_leaves_sampled_tokens_as_they_are(
    target: FrozenTarget, draft_of: Any, method: str, stop: str
) -> None:
    """Certain tokens are verified with the random numbers that `generate()` draws."""
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 6, "top_p": 0.95}
    for seed in range(3):
        torch.manual_seed(seed)
        expected = generate_new_tokens(target, PROMPTS[0], STOPS[stop](), **sampled)
        torch.manual_seed(seed)
        assert (
            generate_new_tokens(
                target, PROMPTS[0], STOPS[stop](), custom_generate=draft_of(method), **sampled
            )
            == expected
        )


class RecordingStreamer(BaseStreamer):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize(
    "stop", ["nothing", "a criterion with a state", "a stop string", "end tokens"]
)
def test_a_streamer_gets_what_it_gets_without_a_draft(
    target: FrozenTarget, draft_of: Any, stop: str
) -> None:
    expected, streamer = RecordingStreamer(), RecordingStreamer()
    generate_new_tokens(target, PROMPTS[1], STOPS[stop](), streamer=expected)
    generate_new_tokens(
        target,
        PROMPTS[1],
        STOPS[stop](),
        streamer=streamer,
        custom_generate=draft_of("all accepted"),
    )
    assert streamer.calls == expected.calls


def test_scores_logits_and_cache_are_those_of_generate(target: FrozenTarget, draft_of: Any) -> None:
    """`generate()` can also continue with the KV cache that a draft leaves."""
    requested_outputs = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "max_new_tokens": LENGTH,
    }
    options = {**requested_outputs, "repetition_penalty": 1.2, "eos_token_id": 7}
    prompt = torch.tensor([PROMPTS[0]])
    expected_output: Any = target.model.generate(prompt, **options)
    output: Any = target.model.generate(prompt, custom_generate=draft_of("all accepted"), **options)
    assert type(output) is type(expected_output) and torch.equal(
        output.sequences, expected_output.sequences
    )
    assert (
        len(output.scores)
        == len(output.logits)
        == output.sequences.shape[1] - prompt.shape[1]
        < LENGTH
    )
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(output, name), getattr(expected_output, name))
    assert (
        output.past_key_values.get_seq_length() == expected_output.past_key_values.get_seq_length()
    )
    more = [
        target.model.generate(
            result.sequences, past_key_values=result.past_key_values, max_new_tokens=9
        )
        for result in (expected_output, output)
    ]
    assert torch.equal(*more)


@pytest.mark.parametrize(
    "stop", ["a criterion of length", "stop strings over two tokens", "a processor with a state"]
)
def test_targets_with_windows_end_where_they_end_without_a_draft(stop: str) -> None:
    target = FrozenTarget(qwen(), tiny_tokenizer(), name="windows")
    options = {**STOPS[stop](), "max_new_tokens": 40, "return_dict_in_generate": True}
    for draft in (
        Draft("all", DraftModelProposer(target.model), target),
        Draft("no", proposer_of("eagle3", target), target),
    ):
        outputs: list[Any] = []
        for draft_options in ({}, {"custom_generate": draft}):
            result: Any = target.model.generate(
                torch.tensor([PROMPTS[0]]), **{**options, **STOPS[stop](), **draft_options}
            )
            more = target.model.generate(
                result.sequences, past_key_values=result.past_key_values, max_new_tokens=12
            )
            outputs.append(more.tolist())
        assert outputs[0] == outputs[1]


def test_a_call_that_fails_leaves_draft_and_model_as_they_were(
    target: FrozenTarget, plain: Any, draft_of: Any
) -> None:
    class Fails(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
            if input_ids.shape[1] > 9:
                raise ZeroDivisionError
            return torch.tensor([False])

    attributes = set(vars(target.model))
    for method in QUICK_METHODS:
        with pytest.raises(ZeroDivisionError):
            generate_new_tokens(
                target,
                PROMPTS[0],
                {"stopping_criteria": make_criteria(Fails())},
                custom_generate=draft_of(method),
            )
        assert set(vars(target.model)) == attributes
        assert not any(
            module._forward_hooks or module._forward_pre_hooks for module in target.model.modules()
        )
        assert generate_new_tokens(
            target, PROMPTS[0], {}, custom_generate=draft_of(method)
        ) == plain("nothing", PROMPTS[0])


def test_other_callables_get_what_transformers_gives_them(target: FrozenTarget) -> None:
    def loop(model: Any, input_ids: Tensor, mine: int = 0, **arguments: Any) -> Any:
        assert mine == 3 and not arguments.keys() & {"tokenizer", "streamer", "synced_gpus"}
        return input_ids

    options = {
        "custom_generate": loop,
        "mine": 3,
        "tokenizer": tiny_tokenizer(),
        "streamer": RecordingStreamer(),
    }
    assert generate_new_tokens(target, PROMPTS[0], options) == []


# Values that are refused for the options that are not supported.
REFUSED: dict[str, Any] = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "num_return_sequences": 2,
    "constraints": [1],
    "force_words_ids": [[1]],
    "penalty_alpha": 0.5,
    "dola_layers": "low",
    "diversity_penalty": 0.5,
    "assistant_tokenizer": tiny_tokenizer(),
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "use_mtp": True,
    "prompt_lookup_num_tokens": 3,
    "max_matching_ngram_size": 3,
    "speculation_type": "dflash",
    "is_assistant": True,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "assistant_confidence_threshold": 0.7,
    "output_attentions": True,
    "output_hidden_states": True,
    "use_cache": False,
    "cache_implementation": "static",
    "compile_config": CompileConfig(),
    "synced_gpus": True,
}
REFUSED["continuous_batching_config"] = {"max_batch_tokens": 8}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", UNSUPPORTED_OPTIONS)
def test_options_that_a_draft_does_not_support_are_refused_by_name(
    target: FrozenTarget, draft_of: Any, name: str
) -> None:
    value = target.model if name == "assistant_model" else REFUSED[name]
    with refused(name):
        generate_new_tokens(
            target,
            PROMPTS[0],
            {name: value},
            custom_generate=draft_of("ngram"),
            do_sample=name == "num_return_sequences",
        )


def test_inputs_that_a_draft_does_not_support_are_refused_by_name(
    target: FrozenTarget, draft_of: Any
) -> None:
    with refused("input_ids", "2 sequences"):
        target.model.generate(
            torch.tensor([PROMPTS[0]] * 2), max_new_tokens=4, custom_generate=draft_of("ngram")
        )
    with refused("past_key_values", "StaticCache"):
        static = StaticCache(target.model.config, max_cache_len=40)
        generate_new_tokens(
            target, PROMPTS[0], {"past_key_values": static}, custom_generate=draft_of("ngram")
        )
    for k in (0, -1, 2.5, "4"):
        with refused("num_speculative_tokens", k):
            generate_new_tokens(
                target, PROMPTS[0], {}, custom_generate=draft_of("ngram"), num_speculative_tokens=k
            )
    tree = behind_lookup(proposer_of("eagle3", target), draft_tree={"branching": [2, 2]})
    with refused("custom_generate", holds="draft_tree"):
        generate_new_tokens(target, PROMPTS[0], {}, custom_generate=Draft("eagle3", tree, target))


# Fields that have an effect, and are tested above or need no test.
HONOURED = {
    *(
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "max_time",
        "stop_strings",
        "do_sample",
    ),
    *(
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
    ),
    *(
        "repetition_penalty",
        "encoder_repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
    ),
    *(
        "bad_words_ids",
        "renormalize_logits",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
    ),
    *(
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "token_healing",
    ),
    *(
        "guidance_scale",
        "watermarking_config",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
    ),
    *("pad_token_id", "bos_token_id", "eos_token_id", "prefill_chunk_size"),
}
# Fields that have no effect on greedy search and sampling, or a dynamic cache, without a draft
# either.
WITHOUT_EFFECT = {
    *(
        "early_stopping",
        "length_penalty",
        "low_memory",
        "decoder_start_token_id",
        "disable_compile",
    ),
    *("cache_config", "max_cache_len", "transformers_version"),
}


def test_each_field_of_a_generation_config_is_honoured_or_refused() -> None:
    """A field of a later transformers fails here first."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - HONOURED - WITHOUT_EFFECT == fields & UNSUPPORTED_OPTIONS.keys()
    assert UNSUPPORTED_OPTIONS.keys() - fields == {
        "assistant_model",
        "assistant_tokenizer",
        "synced_gpus",
    }
    assert not (HONOURED | WITHOUT_EFFECT) - fields


@pytest.mark.parametrize("method", QUICK_METHODS)
def test_options_of_the_models_own_generation_config_are_applied(
    target: FrozenTarget, draft_of: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GenerationConfig(
        stop_strings=["#$", "!"],
        eos_token_id=[0],
        min_new_tokens=3,
        suppress_tokens=[2],
        max_length=20,
    )
    monkeypatch.setattr(target.model, "generation_config", config)
    for prompt in map(torch.tensor, ([PROMPTS[0]], [PROMPTS[1]])):
        expected = target.model.generate(prompt, tokenizer=tiny_tokenizer())
        tokens = target.model.generate(
            prompt, tokenizer=tiny_tokenizer(), custom_generate=draft_of(method)
        )
        assert torch.equal(tokens, expected)
    with pytest.raises(ValueError, match="tokenizer"):  # as without a draft
        target.model.generate(prompt, custom_generate=draft_of(method))
