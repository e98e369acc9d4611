"""Compiled passes of one shape are one graph and give the text of `generate()`, or are refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.sampling import GREEDY, Sampling
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.targets.frozen import FrozenTarget
from tests import mtp_targets
from tests.proposers import ngram_proposer, proposer_of
from tests.refusals import refused
from tests.tiny import qwen, tiny_target_model, tiny_tokenizer

PROMPT = [5, 9, 5, 9, 20, 31]
NEW_TOKENS = 24


def build_target(model: Any, name: str = "tiny") -> FrozenTarget:
    model.generation_config.eos_token_id = []
    return FrozenTarget(model, tiny_tokenizer(), name=name)


def generate_reference(target: FrozenTarget, prompt: list[int]) -> tuple[int, ...]:
    model: Any = target.model
    ids = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return tuple(ids[0, len(prompt) :].tolist())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The compiled graphs, which are traced as for the compiler and then run as they are."""
    traced_graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        traced_graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    return traced_graphs


# "eagle3" reads the target's layers, "draft_model" is often right, and "ngram" sometimes proposes
# nothing.
@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("draft_model", partial(tiny_target_model, num_layers=2)),
        ("ngram", partial(tiny_target_model, num_layers=2)),
        # more than a second of tracing each
        *(
            pytest.param(name, partial(tiny_target_model, num_layers=2), marks=pytest.mark.long)
            for name in (None, "eagle3")
        ),
        pytest.param("ngram", qwen, marks=pytest.mark.long),
    ],
)
def test_one_graph_gives_the_output_of_transformers(
    name: str | None, build: Any, graphs: list[Any]
) -> None:
    target = build_target(build())
    decoder = Decoder(target, name and proposer_of(name, target), compiled=True)
    # what the first prompt left in the KV cache does not change the text of the second
    for prompt in (PROMPT, [7, *PROMPT, 50]):
        run = decoder.generate(prompt, max_new_tokens=NEW_TOKENS, num_speculative_tokens=4)
        assert run.token_ids == generate_reference(target, prompt)
    assert len(graphs) == 1
    if name == "draft_model":
        assert 0 < sum(r.num_accepted for r in run.rounds) < sum(len(r.drafted) for r in run.rounds)


@pytest.mark.long  # ten graphs are traced
def test_each_shape_has_a_graph_however_many_there_are(graphs: list[Any]) -> None:
    target = build_target(tiny_target_model(num_layers=1))
    decoder = Decoder(target, ngram_proposer(), compiled=True)
    for k in range(1, 11):
        decoder.generate(PROMPT, max_new_tokens=4, num_speculative_tokens=k)
    assert len(graphs) == 10


@pytest.mark.long  # more than a second of tracing
def test_the_same_seed_gives_the_same_sampled_output(graphs: list[Any]) -> None:
    target = build_target(tiny_target_model())
    texts = [
        Decoder(target, HeadProposer(build_eagle3(target, seed=0)), compiled=compiled)
        .generate(
            PROMPT,
            max_new_tokens=NEW_TOKENS,
            num_speculative_tokens=3,
            sampling=Sampling(1.0),
            generator=torch.Generator().manual_seed(0),
        )
        .token_ids
        for compiled in (False, True)
    ]
    assert texts[0] == texts[1]


@pytest.mark.long  # a compiler
# which torch calls while it compiles
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_the_real_compiler_keeps_the_output() -> None:
    target = build_target(tiny_target_model(num_layers=2))
    for proposer in (None, proposer_of("eagle3", target)):
        run = Decoder(target, proposer, compiled=True).generate(
            PROMPT, max_new_tokens=NEW_TOKENS, num_speculative_tokens=4
        )
        assert run.token_ids == generate_reference(target, PROMPT)


class Branching(LlamaForCausalLM):  # type: ignore[misc]
    """A model whose decoder reads a number from its input, which no graph can do."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        forward = self.model.forward
        self.model.forward = lambda input_ids, **kwargs: forward(
            input_ids + int(input_ids.sum() < 0), **kwargs
        )


class Summing(LlamaForCausalLM):  # type: ignore[misc]
    """A model whose decoder also reads padding, in passes over a fully allocated KV cache."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        forward = self.model.forward

        def add_width(input_ids: Tensor, **kwargs: Any) -> Any:
            output = forward(input_ids, **kwargs)
            if type(kwargs.get("past_key_values")).__name__ == "StaticCache":
                output.last_hidden_state = output.last_hidden_state + input_ids.shape[1]
            return output

        self.model.forward = add_width


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (
            lambda: mtp_targets.tiny_model("qwen3_next"),
            "which has layers of kind LinearAttentionLayer",
        ),
        (lambda: Branching(tiny_target_model().config).eval(), "a Branching: "),
        (
            lambda: Summing(tiny_target_model(num_layers=1).config).eval(),
            "a Summing, whose compiled passes give other hidden states",
        ),
    ],
    ids=["recurrent", "branching", "summing"],
)
def test_targets_that_cannot_be_compiled_are_refused(
    build: Any, what: str, graphs: list[Any]
) -> None:
    target = build_target(build(), name="odd")
    with refused("eval.compile", f"true for odd, {what}"):
        Decoder(target, ngram_proposer(), compiled=True).generate(
            PROMPT, max_new_tokens=8, num_speculative_tokens=2
        )


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("mtp", Sampling(1.0)),
        # more than a second of tracing each
        pytest.param("eagle3, two layers", GREEDY, marks=pytest.mark.long),
        pytest.param("eagle3, window", Sampling(1.0), marks=pytest.mark.long),
        pytest.param("eagle", Sampling(1.0), marks=pytest.mark.long),
    ],
)
def test_a_head_drafts_the_same_with_two_graphs(
    name: str, sampling: Sampling, graphs: list[Any]
) -> None:
    target, drafts = build_target(tiny_target_model()), []
    for compiled in (False, True):
        head = proposer_of(name, target)
        head.compiled = compiled
        runs = [
            Decoder(target, head).generate(
                prompt,
                max_new_tokens=NEW_TOKENS,
                num_speculative_tokens=3,
                sampling=sampling,
                generator=torch.Generator().manual_seed(1),
            )
            for prompt in (PROMPT, [7, *PROMPT, 50], PROMPT)
        ]
        drafts.append([[round.drafted for round in run.rounds] for run in runs])
    assert drafts[0] == drafts[1] and drafts[1][0] == drafts[1][2]
    assert 1 <= len(graphs) <= 2  # there is one graph where no draft is ever accepted
