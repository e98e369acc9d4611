"""Sizes of decoders and of drafts, in parameters, and what a method tells `specdistill plan` before anything is trained.

Acceptance and training data are as others published them: greedy decoding, targets of 2 to 70 billion parameters; this project measured
none of it. A chain's acceptance length AL at K is turned into alpha, the rate that gives it when it is the same at every position
(arXiv 2211.17192).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from specdistill.errors import UserError, refusing
from specdistill.targets.anatomy import CLASS_ERRORS, auto_class, reads_images
from specdistill.targets.cache_size import CacheSize, cache_size, of_attention
from specdistill.targets.frozen import Features, FrozenTarget, tiny_random_target

TOKENS_PER_SAMPLE = 950  # DeepSpec's cache: about 38 TB of 30 KB a token for 1.3M conversations
DRAFT_VOCABULARY = 32_000
ASSUMED_DTYPE = torch.bfloat16  # where a config names none
CAUSAL_LM = "the config.json of a causal language model"


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder. head_dim times num_attention_heads need not be hidden_size."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


def shape_of(config: Any) -> ModelShape:
    """The sizes in a Hugging Face config of a Llama-like decoder."""
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None)
        or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
    )


@dataclass(frozen=True)
class ParameterCounts:
    """A draft in parameters.

    parameters: in its checkpoint. read: by a step of one token, with what it borrows of the target, without embedding tables.
    copied: tables of the target that training holds in addition, frozen.
    """

    parameters: int
    read: float
    num_layers: int
    copied: int = 0


Weigh = Callable[[str, nn.Parameter], float]  # what a parameter of this name counts


def weights_read(
    model: PreTrainedModel,
    num_tokens: int = 1,
    weigh: Weigh = lambda name, parameter: parameter.numel(),
) -> float:
    """Parameters that one pass over `num_tokens` tokens reads: all but an embedding table that is not the head."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    unread = (
        0.0
        if head.weight is embedding.weight
        else weigh(names[id(embedding.weight)], embedding.weight)
    )
    return parameters_read(model, model.config.get_text_config(), num_tokens, weigh) - unread


def parameters_read(
    module: nn.Module,
    config: Any,
    num_tokens: int = 1,
    weigh: Weigh = lambda name, parameter: parameter.numel(),
) -> float:
    """A module's parameters, of a mixture's E experts those that the tokens are sent to.

    With k experts for each of n tokens, chosen independently, a share of 1 - (1 - k/E)^n of them; k/E for one token.
    """
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    num_experts = next((size for name in names if (size := getattr(config, name, None))), 1)
    chosen = getattr(config, "num_experts_per_tok", None) or num_experts
    share = 1 - (1 - chosen / num_experts) ** num_tokens
    sizes = (
        ("experts" in name.split("."), weigh(name, parameter))
        for name, parameter in module.named_parameters()
    )
    return sum(size * share if of_expert else size for of_expert, size in sizes)


@dataclass(frozen=True)
class PublishedFigures:
    """alphas: the lower and the higher acceptance rate. training_tokens: distinct tokens that such drafts are trained on."""

    alphas: tuple[float, float] | None
    acceptance_source: str
    training_tokens: int | None
    training_source: str


@dataclass(frozen=True)
class Described:
    """A target or a draft by its config.json, as the file has it (`raw`) and as transformers reads it.

    key: what errors name. hub_id: None for what came from a folder. native_mtp: the key that says how many layers predict further tokens,
    and how many; None without such layers. stored_bytes: of all weights, as the checkpoint's index or file says; None where neither is
    at hand.
    """

    name: str
    key: str
    hub_id: str | None
    revision: str | None
    raw: dict[str, Any]
    config: Any
    native_mtp: tuple[str, int] | None
    trust_remote_code: bool = False
    stored_bytes: int | None = None

    @property
    def text(self) -> Any:
        """The language model's part of the config."""
        return self.config.get_text_config()

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the weights; None where the file does not say."""
        stated = self.config.dtype or self.text.dtype
        return stated if isinstance(stated, torch.dtype) else None

    @property
    def kind(self) -> str:
        return ", ".join(self.raw.get("architectures") or []) or str(self.raw.get("model_type"))

    @property
    def calls_itself(self) -> str:
        """Its architectures and model type, in small letters."""
        return " ".join(
            [*(self.raw.get("architectures") or []), str(self.raw.get("model_type"))]
        ).lower()

    @property
    def is_causal_lm(self) -> bool:
        """Whether transformers reads a causal language model out of it, and the file does not call itself something else."""
        if "AutoModelForCausalLM" in self.raw.get("auto_map", {}):
            return True
        named = set(self.raw.get("architectures") or [])
        # The language model of one for text and images is a causal one, whatever the whole is called.
        right = (
            not named
            or "text_config" in self.raw
            or bool(named & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
        )
        known = reads_images(self.config) or (
            right and type(self.config) in MODEL_FOR_CAUSAL_LM_MAPPING
        )
        return known and not self.config.is_encoder_decoder

    @cached_property
    def model(self) -> Any:
        """On the meta device: every shape, no weights. Raises UserError for what is no causal language model."""
        if not self.is_causal_lm:
            raise UserError(self.key, got=f"{self.name}, a {self.kind}", expected=CAUSAL_LM)
        for size in ("num_hidden_layers", "hidden_size", "vocab_size"):
            if (got := getattr(self.text, size)) < 1:
                raise UserError(
                    self.key, got=f"{self.name} with {size} {got}", expected="1 or more"
                )
        with (
            refusing(
                CLASS_ERRORS, self.key, f"{self.name}, of which no model can be built", CAUSAL_LM
            ),
            torch.device("meta"),
        ):
            return auto_class(self.config).from_config(
                self.config, trust_remote_code=self.trust_remote_code
            )

    @cached_property
    def parameters(self) -> int:
        return int(self.model.num_parameters())

    @cached_property
    def cache(self) -> CacheSize | None:
        """Of the KV cache; None for a class that does not show it."""
        return cache_size(self.model)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The settings of quantised weights."""
        return (self.raw | (self.raw.get("text_config") or {})).get("quantization_config")

    def itemsize(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of a weight that no quantization converted."""
        return (dtype or self.dtype or ASSUMED_DTYPE).itemsize

    @cached_property
    def converted(self) -> frozenset[str]:
        """Parameters that quantization took: matrices that are no table of tokens, and that it does not name as kept."""
        if self.quantization is None:
            return frozenset()
        kept = [
            *(self.quantization.get("modules_to_not_convert") or []),
            *(self.quantization.get("ignore") or []),
        ]
        kept += ["*embed_tokens", "*lm_head"]
        matrices = (name for name, parameter in self.model.named_parameters() if parameter.ndim > 1)
        return frozenset(
            name for name in matrices if not any(fnmatch(name, f"{pattern}*") for pattern in kept)
        )

    @cached_property
    def converted_itemsize(self) -> float:
        """Bytes of a weight that quantization took, scales included, on average: what the stored bytes leave for them.

        Layers that predict further tokens are stored next to those of the class, and as large as its last one.
        """
        if not self.converted or self.stored_bytes is None:
            return self.itemsize()
        sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        last, extra = f".layers.{self.text.num_hidden_layers - 1}.", (self.native_mtp or ("", 0))[1]
        kept = sum(size for name, size in sizes.items() if name not in self.converted)
        taken = sum(sizes[name] * (1 + extra * (last in name)) for name in self.converted)
        return float(min(self.itemsize(), (self.stored_bytes - kept * self.itemsize()) / taken))

    def weigh(self, dtype: torch.dtype | None = None) -> Weigh:
        """Bytes of a parameter of `model`, in a dtype or as the checkpoint has it."""
        return lambda name, parameter: (
            parameter.numel()
            * (self.converted_itemsize if name in self.converted else self.itemsize(dtype))
        )

    @cached_property
    def tiny_random(self) -> FrozenTarget | None:
        """A small target of the same class, or None. Raises UserError where decoding would refuse the target."""
        return tiny_random_target(self.config, self.name, trust_remote_code=self.trust_remote_code)

    def tried(self, build: Callable[[FrozenTarget], Any]) -> FrozenTarget:
        """The tiny random target, after building a head for it. Raises UserError as for the target itself, or where there is none."""
        if self.tiny_random is None:
            got = f"{self.name}, a {type(self.model).__name__} of which no small model can be made"
            raise UserError(self.key, got=got, expected="one that can be tried without its weights")
        build(self.tiny_random)
        return self.tiny_random

    @cached_property
    def weightless(self) -> "WeightlessTarget":
        """On the meta device. The tiny random one, which has to decode, is made before."""
        _ = self.tiny_random
        with torch.device("meta"):
            return WeightlessTarget(self)


class WeightlessTarget(FrozenTarget):
    """A target at its full size whose tensors have no content: the parts of a tiny random one, by the names that they have there."""

    def __init__(self, target: Described) -> None:
        own, dtype = target.tried(lambda tiny_random: None), target.dtype or ASSUMED_DTYPE
        model = auto_class(target.config).from_config(
            target.config, dtype=dtype, trust_remote_code=target.trust_remote_code
        )
        names = {part: name for name, part in own.model.named_modules()}
        vars(self).update(
            vars(own),
            model=model.eval().requires_grad_(False),
            config=model.config.get_text_config(decoder=True),
        )
        self.backbone, self.layers = (
            model.get_submodule(names[part]) for part in (own.backbone, own.layers)
        )
        self.norm = None if own.norm is None else model.get_submodule(names[own.norm])
        self.lm_head = model.get_output_embeddings()
        self.logits = replace(own.logits, linear=self.lm_head)
        self.hidden_size, self.vocab_size = (
            int(self.config.hidden_size),
            int(self.config.vocab_size),
        )

    def features(self, input_ids_BT: Tensor, aux_layers: Sequence[int], **options: Any) -> Features:
        shape, dtype = (*input_ids_BT.shape, self.hidden_size), self.lm_head.weight.dtype
        *aux, last = (torch.empty(shape, dtype=dtype) for _ in range(len(aux_layers) + 1))
        return Features(tuple(aux), last)


@dataclass(frozen=True)
class PlannedDraft:
    """One method's draft for a target.

    Args:
        shape: of its layers; None where it has none.
        vocabulary: tokens that its logits span.
        note: what it is, in words.
        cache: of its KV cache; None where it has none, or where its class does not show it.
        recipe_keys: what a recipe made for another target needs changed for this one.
        counted_with: keys of `draft:` with which training is counted.
        warnings: what contradicts the target's config.json.
        build: the draft for the target at its full size, whose tensors may have no content (see specdistill.planning.accounting).
    """

    parts: ParameterCounts
    shape: ModelShape | None
    vocabulary: int
    note: str
    published: PublishedFigures
    cache: CacheSize | None = None
    recipe_keys: tuple[str, ...] = ()
    counted_with: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    build: Callable[[FrozenTarget], Any] | None = None


def planned_shape(
    target: Described, given: Described | None, settings: Mapping[str, Any]
) -> ModelShape:
    """Of the head that is given, or of the one that a recipe with these keys of `draft:` would train."""
    sizes = {
        name: size
        for name in ModelShape.__annotations__
        if (size := settings.get(name)) is not None
    }
    return (
        shape_of(given.text)
        if given
        else replace(shape_of(target.text), **{"num_layers": 1, **sizes})
    )


def cache_of_head(shape: ModelShape, given: Described | None) -> CacheSize:
    """Of a head's layers, which are as Llama's; those of a head that is given may have a window."""
    kinds = set(given.raw.get("layer_types") or []) if given else set()
    window = given.raw.get("sliding_window") if given and kinds == {"sliding_attention"} else None
    return of_attention(shape.num_layers, shape.num_key_value_heads, shape.head_dim, window)
