"""EAGLE heads in the layouts that engines load: tables of what each writes, and of what each cannot express.

Read in the sources of vLLM 0.32 and 0.33, SGLang 0.5.23, speculators 0.9, SafeAILab/EAGLE and llama.cpp (as in llama-cpp-python 0.3.36):

- vLLM counts auxiliary layers as here, in a top-level list; SGLang counts one less, in `eagle_config`. Neither list is written where
  the layers are the default ones. vLLM's older runner takes SGLang's list for its own, so no file holds both.
- vLLM and SGLang take a `bias` that is true for one of the attention, too: EAGLE-1's is false for vLLM, which has none in `fc`, and
  left out elsewhere. SGLang's `fc` always has one, so zeros are written for a head without; so they are for SafeAILab's.
- SafeAILab reads the target's embedding itself, but not for an EAGLE-3 head whose config has a `target_hidden_size`.
- speculators keeps embedding and head of every draft, and names the target: vLLM serves the folder alone.
- llama.cpp has a converter of its own for EAGLE-3, which reads vLLM's folder; it does not know the norms of EAGLE-3.1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdistill.errors import UserError
from specdistill.export.folder import new_folder
from specdistill.methods.checkpoint import is_copy, shape_to_json, stored_dtype, write_draft
from specdistill.methods.eagle.checkpoint import read_eagle
from specdistill.methods.eagle.module import EagleDraft
from specdistill.methods.eagle3.checkpoint import IDS, read_eagle3, resolve_embedding
from specdistill.methods.eagle3.module import Eagle3Config
from specdistill.methods.layers import HeadShape
from specdistill.targets.files import EMBEDDING, HEAD, TargetFiles, needed
from specdistill.targets.frozen import engine_aux_layers

SPECULATORS_VERSION = "0.9.0"


@dataclass(frozen=True)
class Limit:
    """What some engines cannot express: a setting, whether a head has it, and what heads have instead there."""

    engines: tuple[str, ...]
    setting: str
    has: Callable[[Any], bool]
    instead: str


def _reads_default_layers(config: Eagle3Config) -> bool:
    return list(config.aux_layers) == engine_aux_layers(config.target_num_layers)


EVERY_ENGINE = ("vllm", "sglang", "speculators", "safeailab", "gguf")
PLAIN_ATTENTION = "attention to all positions"
LIMITS: dict[str, tuple[Limit, ...]] = {
    "eagle3": (
        Limit(
            ("sglang", "safeailab"),
            "norm_before_residual",
            lambda head: head.norm_before_residual,
            "a head whose residual is the state before its norm",
        ),
        Limit(("safeailab", "gguf"), "fc_norm", lambda head: head.fc_norm, "a head without the norms of EAGLE-3.1"),
        Limit(
            ("safeailab", "gguf"),
            "norm_output",
            lambda head: head.norm_output,
            "a head that feeds back the state before its norm",
        ),
        Limit(("safeailab",), "norm_before_fc", lambda head: head.norm_before_fc, "a head without a norm before fc"),
        Limit(
            ("sglang", "safeailab", "gguf"),
            "more than one layer",
            lambda head: head.num_layers > 1,
            "one layer: there are no others, or others with other norms",
        ),
        Limit(("safeailab", "gguf"), "a sliding window", lambda head: head.sliding_window is not None, PLAIN_ATTENTION),
        Limit(
            ("sglang", "safeailab"),
            "an embedding of its own, as wide as the target's",
            lambda head: head.own_embedding,
            "the target's embedding; target= tells a copy of it from another",
        ),
        Limit(("safeailab", "gguf"), "other than three auxiliary layers", lambda head: len(head.aux_layers) != 3, "three"),
        Limit(("safeailab",), "chosen auxiliary layers", lambda head: not _reads_default_layers(head), "2, n//2 and n-3"),
        Limit(
            ("sglang", "gguf"),
            "the state after the target's last layer",
            lambda head: head.target_num_layers in head.aux_layers,
            "states that enter a layer",
        ),
        Limit(
            EVERY_ENGINE,
            "auxiliary layers out of order",
            lambda head: list(head.aux_layers) != sorted(set(head.aux_layers)),
            "ascending layers",
        ),
        Limit(
            ("sglang", "safeailab"),
            "a state as wide as what fc reads",
            lambda head: len(head.aux_layers) * head.target_hidden_size == head.hidden_size,
            "different widths: of equal ones fc is left out",
        ),
        Limit(("safeailab",), "scaled rotary frequencies", lambda head: head.rope_scaling is not None, "plain ones"),
    ),
    "eagle": (
        Limit(("vllm",), "a bias in fc", lambda head: head.fc_bias, "a head without one"),
        Limit(EVERY_ENGINE, "a sliding window", lambda head: head.sliding_window is not None, PLAIN_ATTENTION),
        Limit(
            ("safeailab",),
            "attention heads that are together not as wide as the state",
            lambda head: head.num_attention_heads * head.head_dim != head.hidden_size,
            "num_attention_heads x head_dim = hidden_size",
        ),
        Limit(("safeailab",), "scaled rotary frequencies", lambda head: head.rope_scaling is not None, "plain ones"),
    ),
}


@dataclass(frozen=True)
class Eagle3Layout:
    """config.json and names of an EAGLE-3 head.

    keys: those of the head's own that readers know, beside a Llama's and `draft_vocab_size`.
    ids: after which layers the head reads -> where that stands; asked only for layers that are not the default ones.
    """

    architecture: str = "LlamaForCausalLMEagle3"
    first_layer: str = "midlayer."
    keys: tuple[str, ...] = ()
    ids: Callable[[list[int]], dict[str, Any]] = lambda layers: {}


NORMS = ("fc_norm", "norm_output", "norm_before_fc")
EAGLE3_LAYOUTS = {
    "vllm": Eagle3Layout(
        keys=("target_hidden_size", "num_aux_hidden_states", *NORMS, "norm_before_residual"),
        ids=lambda layers: {IDS: layers},
    ),
    "sglang": Eagle3Layout(
        keys=("target_hidden_size", "num_aux_hidden_states", *NORMS),
        ids=lambda layers: {"eagle_config": {"use_aux_hidden_state": True, IDS: [layer - 1 for layer in layers]}},
    ),
    "safeailab": Eagle3Layout(architecture="LlamaForCausalLM"),
    "gguf": Eagle3Layout(
        keys=("target_hidden_size", "num_aux_hidden_states", "norm_before_fc", "norm_before_residual"),
        ids=lambda layers: {IDS: layers},
    ),
    "speculators": Eagle3Layout(first_layer="layers.0."),
}
# A Llama's keys -> the config.json of an EAGLE-1 head.
EAGLE_LAYOUTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "vllm": lambda llama: {
        "model_type": "eagle",
        "model": {"architectures": ["LlamaForCausalLM"], **llama, "bias": False},
        "truncated_vocab_size": None,
        "method": "eagle",
    },
    "sglang": lambda llama: {"architectures": ["LlamaForCausalLMEagle"], **llama},
    "safeailab": lambda llama: {"architectures": ["LlamaForCausalLM"], **llama},
}


def export_eagle3(folder: Path, engine: str, output: Path, target: TargetFiles | None, num_speculative_tokens: int) -> None:
    """Write an EAGLE-3 head for an engine. Raises UserError, before anything is written, for what the engine cannot express."""
    config, tensors = read_eagle3(folder, target, key="draft")
    comparable = EMBEDDING in tensors and config.hidden_size == config.target_hidden_size
    config = resolve_embedding(config, tensors, target.tensor(EMBEDDING) if target and comparable else None)
    _check_limits("eagle3", engine, config, folder)
    dtype = stored_dtype(tensors.values())
    if HEAD not in tensors:
        tensors[HEAD] = needed(target, f"{folder} leaves out {HEAD}").tensor(HEAD).to(dtype)
    if config.prunes_vocabulary:
        ids = torch.arange(config.draft_vocab_size) + tensors["d2t"]
        tensors |= {"d2t": tensors["d2t"].long(), "t2d": torch.isin(torch.arange(config.vocab_size), ids)}
    layout = EAGLE3_LAYOUTS[engine]
    if engine == "speculators":
        verifier = needed(target, "speculators' config.json names it")
        if EMBEDDING not in tensors:
            tensors[EMBEDDING] = verifier.tensor(EMBEDDING).to(dtype)
        written = speculators_config(config, dtype, verifier, num_speculative_tokens)
    else:
        written = eagle3_config(config, dtype, layout)
    with new_folder(output) as partial:
        renamed = {name.replace("layers.0.", layout.first_layer): tensor for name, tensor in tensors.items()}
        write_draft(partial, written, renamed)


def eagle3_config(config: Eagle3Config, dtype: torch.dtype, layout: Eagle3Layout) -> dict[str, Any]:
    """The config.json of an EAGLE-3 head."""
    own = {**vars(config), "num_aux_hidden_states": len(config.aux_layers)}
    keys = layout.keys
    if config.hidden_size != config.target_hidden_size and "target_hidden_size" not in keys:
        keys = (*keys, "target_hidden_size")
    return {
        "architectures": [layout.architecture],
        **shape_to_json(config, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        **{key: own[key] for key in keys},
        **({} if _reads_default_layers(config) else layout.ids(list(config.aux_layers))),
    }


def speculators_config(config: Eagle3Config, dtype: torch.dtype, verifier: TargetFiles, num_tokens: int) -> dict[str, Any]:
    """The config.json of speculators' `Eagle3Speculator`, from which vLLM takes the target and how many tokens to draft."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    same_width = config.hidden_size == config.target_hidden_size
    # vLLM carries over what stands in there, and counts three states otherwise, whatever layers are listed.
    counted = {} if len(config.aux_layers) == 3 else {"num_aux_hidden_states": len(config.aux_layers)}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier.name, "architectures": verifier.config.get("architectures") or []},
        },
        "transformer_layer_config": {**shape_to_json(config, dtype), **counted},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if same_width else config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        **{key: getattr(config, key) for key in NORMS},
        IDS: list(config.aux_layers),
        "embed_requires_grad": config.owns_embedding,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }


def export_eagle(folder: Path, engine: str, output: Path, target: TargetFiles | None) -> None:
    """Write an EAGLE-1 head for an engine. Raises UserError, before anything is written, for what the engine cannot express, and for a
    head that brings an embedding or a head that is not the target's.
    """
    config, tensors = read_eagle(folder, target, key="draft")
    _check_limits("eagle", engine, config, folder)
    for name in EagleDraft.shared & tensors.keys():
        if not is_copy(tensors.pop(name), needed(target, f"{folder} repeats its {name}").tensor(name)):
            raise UserError("draft", got=f"{folder} with another {name} than its target has", expected="a head made for it")
    dtype = stored_dtype(tensors.values())
    if engine != "vllm":
        tensors.setdefault("fc.bias", torch.zeros(config.hidden_size, dtype=dtype))
    if engine == "safeailab":
        tensors[EMBEDDING] = needed(target, "SafeAILab's heads repeat its embedding").tensor(EMBEDDING).to(dtype)
    with new_folder(output) as partial:
        write_draft(partial, EAGLE_LAYOUTS[engine](shape_to_json(config, dtype)), tensors)


def _check_limits(method: str, engine: str, config: HeadShape, folder: Path) -> None:
    for limit in LIMITS[method]:
        if engine in limit.engines and limit.has(config):
            raise UserError("engine", got=f"{engine} for {folder}, a head with {limit.setting}", expected=limit.instead)
