"""Heads for targets with a rotary embedding for each kind of layer, and with scaled embeddings,
such as Gemma 3 and 4."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdistill.advice.plan.plan import make_plan
from specdistill.advice.plan.reading import read_model_config
from specdistill.common.errors import UserError
from specdistill.decoding.decoder import Decoder
from specdistill.methods.blocks.checkpoint import load_block, save_block
from specdistill.methods.blocks.proposer import BlockProposer
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.chains.serving import describe_head_engines
from specdistill.methods.compatibility import check_draft
from specdistill.methods.rope import choose_entry
from specdistill.serving.export import export, find_serving
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from tests.heads import KINDS, build_block, build_head, load_head, save_head
from tests.memorised import PROMPT, memorise
from tests.targets.architectures import tiny_config, tiny_model
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # the classes warn
METHODS = ("eagle3", "eagle", "dflash", "dspark")
GEMMAS = ("gemma3_text", "gemma3", "gemma4_text", "gemma4_unified_text")
FULL, SLIDING = (
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "default", "rope_theta": 1e4},
)


@cache
@torch.no_grad()
def build_target(kind: str) -> FrozenTarget:
    """Return a random Gemma whose text varies.

    Its norms are large, as those of trained models are, and its layers outweigh the embedding.
    """
    config = tiny_config(kind)
    text = config.get_text_config(decoder=True)
    text.update({"vocab_size": 260, "eos_token_id": None})
    text.final_logit_softcapping = 30.0 if kind.startswith("gemma4") else None
    if hasattr(text, "vocab_size_per_layer_input"):
        text.vocab_size_per_layer_input = 260
    if hasattr(config, "image_token_id"):
        config.image_token_id = 259
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    target = FrozenTarget(model, tiny_tokenizer(), name=kind)
    for name, parameter in target.layers.named_parameters():
        if "post_" in name and "norm" in name:
            parameter.fill_(7.0)
    size = target.hidden_size
    target.norm.weight.copy_(
        26 * (0.5 + torch.rand(size, generator=torch.Generator().manual_seed(0)))
    )
    return target


def build_draft(method: str, target: FrozenTarget, **shape: Any) -> Any:
    """Return a fresh head or block drafter."""
    return (
        build_block(method, target, **shape)
        if method in KINDS
        else build_head(method, target, **shape)
    )


def build_proposer(method: str, draft: Any) -> Any:
    return BlockProposer(draft) if method in KINDS else HeadProposer(draft)


def generate_greedily(target: FrozenTarget, num_tokens: int) -> tuple[list[int], list[int]]:
    """Return the prompt and the greedy text that transformers' own generate() writes."""
    prompt = target.tokenizer(PROMPT)["input_ids"]
    ids = target.model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    text = ids[0, len(prompt) :].tolist()
    assert len(set(text)) > 3
    return prompt, text


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"full_attention": FULL, "sliding_attention": SLIDING}, FULL),
        ({"sliding_attention": SLIDING, "full_attention": None}, SLIDING),
        (
            {
                "full_attention": {
                    **FULL,
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                }
            },
            FULL,
        ),
        (
            {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        ),
        (None, {}),
    ],
)
def test_a_head_takes_the_entry_of_full_attention(
    parameters: Any, expected: dict[str, Any]
) -> None:
    assert choose_entry(parameters) == expected


@pytest.mark.parametrize("method", METHODS)
def test_heads_use_the_rotary_embedding_of_full_attention(method: str) -> None:
    """The expected tables are those of the rotary embedding in transformers' own model."""
    target = build_target("gemma3_text")
    positions = torch.arange(200)[None]
    like = torch.zeros(1, 1, 1)
    expected = target.backbone.rotary_emb(like, positions, layer_type="full_attention")
    assert (
        target.config.rope_parameters["full_attention"]
        != target.config.rope_parameters["sliding_attention"]
    )
    for table, actual in zip(
        expected, build_draft(method, target).rotary(like, positions), strict=True
    ):
        assert torch.allclose(table, actual, atol=1e-6)
    assert build_draft(method, target, rope_theta=5e5).config.rope_theta == 5e5


@pytest.mark.parametrize(
    "kind", ["llama", "gemma", "gemma2", "vaultgemma", "gemma3_text", "gemma4_text", "minicpm3"]
)
def test_embeddings_are_scaled_as_the_target_scales_them(kind: str, tmp_path: Path) -> None:
    """The expected embeddings are those that the target's own module looks up.

    EAGLE-3 normalizes the embedding, so a scale changes nothing.
    """
    target = FrozenTarget(tiny_model(kind), tiny_tokenizer(), name=kind)
    ids = torch.arange(3, 40)[None]
    expected = target.model.get_input_embeddings()(ids)
    eagle = build_head("eagle", target)
    save_head("eagle", eagle, tmp_path / "eagle")
    block = build_block("dflash", target)
    save_block(block, KINDS["dflash"], tmp_path / "dflash")
    loaded = [
        load_head("eagle", tmp_path / "eagle", target),
        load_block(KINDS["dflash"], tmp_path / "dflash", target),
    ]
    for draft in (eagle, block, *loaded):
        assert torch.allclose(draft.embed_tokens(ids), expected)
    assert ("embedding_scale" in (tmp_path / "eagle" / "config.json").read_text()) == (
        kind != "llama"
    )
    head = build_head("eagle3", target)
    norm = head.layers[0].input_layernorm
    assert torch.allclose(norm(head.embed_tokens(ids)), norm(expected), atol=1e-2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.long] * (kind != "gemma3_text")) for kind in GEMMAS],
)
def test_greedy_text_is_that_of_generate(kind: str, method: str) -> None:
    target = build_target(kind)
    prompt, expected = generate_greedily(target, 24)
    decoder = Decoder(target, build_proposer(method, build_draft(method, target)))
    assert (
        list(decoder.generate(prompt, max_new_tokens=24, num_speculative_tokens=4).token_ids)
        == expected
    )


# Each method and each class of targets is tried once. ARGS=all tries every pair.
@pytest.mark.long  # each head is trained for a quarter of a minute
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        pytest.param(
            kind,
            method,
            marks=[pytest.mark.extended] * (GEMMAS.index(kind) != METHODS.index(method)),
        )
        for kind in GEMMAS
        for method in METHODS
    ],
)
def test_a_memorised_text_is_accepted(kind: str, method: str, tmp_path: Path) -> None:
    target = build_target(kind)
    heads_folder = memorise(method, target, tmp_path / "run", begins_evenly=True)
    draft = (
        load_block(KINDS[method], heads_folder, target)
        if method in KINDS
        else load_head(method, heads_folder, target)
    )
    prompt, expected = generate_greedily(target, 60)
    result = Decoder(target, build_proposer(method, draft)).generate(
        prompt, max_new_tokens=60, num_speculative_tokens=4
    )
    assert list(result.token_ids) == expected
    assert 60 / len(result.rounds) > 3.5


@pytest.fixture(scope="module")
def heads_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a target of each of two classes, and heads for them."""
    path = tmp_path_factory.mktemp("gemma")
    for kind in ("gemma3_text", "gemma4_text"):
        model = build_target(kind).model
        model.save_pretrained(path / kind)
        tiny_tokenizer().save_pretrained(path / kind)
        for method in ("eagle3", "eagle"):
            save_head(method, build_head(method, build_target(kind)), path / f"{method} for {kind}")
    return path


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("gemma3_text", "does not serve heads for Gemma 3"),
        ("gemma4_text", "serves heads for Gemma 4"),
    ],
)
def test_plan_and_serve_md_say_which_engines_serve_a_head(
    heads_folder: Path, kind: str, note: str, tmp_path: Path
) -> None:
    plan = make_plan(read_model_config(str(heads_folder / kind), key="target.model"))
    rows = {row.method: row for row in plan.methods}
    assert all(rows[method].available and note in rows[method].note for method in METHODS)
    export(
        heads_folder / f"eagle3 for {kind}",
        "vllm",
        tmp_path / "out",
        TargetFiles(str(heads_folder / kind)),
    )
    assert note in (tmp_path / "out" / "SERVE.md").read_text()


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text"])
def test_a_head_for_its_target_has_no_findings(heads_folder: Path, kind: str) -> None:
    """A base or a kind of rotary embedding that the target's full attention has is no finding."""
    assert (
        check_draft(
            "eagle3",
            heads_folder / f"eagle3 for {kind}",
            TargetFiles(str(heads_folder / kind)),
            "draft",
        )
        == []
    )


@torch.no_grad()
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_exported_eagle_head_reads_the_table_unscaled(
    heads_folder: Path, engine: str, tmp_path: Path
) -> None:
    """The output of fc is the same as before, though engines do not scale the embedding."""
    target = build_target("gemma3_text")
    export(
        heads_folder / "eagle for gemma3_text",
        engine,
        tmp_path / "out",
        TargetFiles(str(heads_folder / "gemma3_text")),
    )
    assert "embedding_scale" not in (tmp_path / "out" / "config.json").read_text()
    exported = load_head("eagle", tmp_path / "out", target)
    trained = load_head("eagle", heads_folder / "eagle for gemma3_text", target)
    ids = torch.arange(3, 40)[None]
    feature = torch.zeros(1, 37, target.hidden_size)
    expected = trained.fc(torch.cat((target.model.get_input_embeddings()(ids), feature), dim=-1))
    table = torch.nn.functional.embedding(ids, target.tensor("embed_tokens.weight"))
    assert torch.allclose(exported.fc(torch.cat((table, feature), dim=-1)), expected, atol=1e-5)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_engines_that_do_not_scale_embeddings_refuse_drafters_that_do(method: str) -> None:
    draft = build_block(method, build_target("gemma3_text"))
    for engine in ("sglang", "llama.cpp"):
        _, layout = find_serving(engine, method, "the draft")
        with pytest.raises(UserError, match="a scaled embedding"):
            layout.check(engine, draft.config, "the draft")


def test_only_heads_for_gemma_have_a_note_on_engines() -> None:
    assert "vLLM does not serve" in describe_head_engines("eagle3", "gemma3_text")
    assert describe_head_engines("dflash", "gemma4_text").startswith("vLLM serves")
    assert not describe_head_engines("eagle3", "llama")
    assert not describe_head_engines("mtp", "gemma3_text")
