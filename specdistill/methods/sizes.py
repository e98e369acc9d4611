"""Count the parameters of targets and drafts, and hold what `specdistill plan` asks of a method.

All of this is known before anything is trained. Acceptance and training data are as others
published them, for greedy decoding and targets of 2 to 70 billion parameters. This project measured
none of it. A chain's acceptance length AL at K is converted into alpha, the acceptance rate that
gives this length if it is the same at every position (arXiv 2211.17192).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from specdistill.common.errors import UserError, convert_errors
from specdistill.targets.anatomy import CLASS_ERRORS, find_auto_class, reads_images
from specdistill.targets.cache_size import CacheSize, build_attention_cache_size, cache_size
from specdistill.targets.frozen import Features, FrozenTarget, build_tiny_target

TOKENS_PER_SAMPLE = 950  # DeepSpec's cache: about 38 TB of 30 KB a token for 1.3M conversations
# Tokens of a reduced draft vocabulary by default, as published EAGLE-3 heads have them.
DRAFT_VOCABULARY = 32_000
ASSUMED_DTYPE = torch.bfloat16  # for a config that names no dtype
RawConfig = Mapping[str, Any]  # the content of a config.json
CAUSAL_LM = "the config.json of a causal language model"


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder.

    `head_dim` times `num_attention_heads` need not be `hidden_size`.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


def read_model_shape(config: PreTrainedConfig | SimpleNamespace) -> ModelShape:
    """Return the sizes of a Llama-like decoder from its Hugging Face config.

    A config may leave out two sizes. There are then as many key/value heads as attention heads, and
    the head size is hidden size / attention heads.
    """
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


def read_size(config: PreTrainedConfig, name: str) -> int | None:
    """Return a size from a config; None if the config has no such size.

    If the size differs between layers, the value is the one that config.json states.
    """
    try:
        return getattr(config, name, None)
    except RuntimeError:
        # For Gemma 4, transformers raises this error for a size that differs between layers.
        return config.to_dict().get(name)


def read_head_shape(config: PreTrainedConfig) -> ModelShape:
    """Return the default sizes of a head, which are the sizes of its target's decoder.

    A head is a draft that reads hidden states of the target. Unlike `read_model_shape`, this
    function works for configs whose sizes differ between layers.

    Args:
        config: the target's text config.
    """
    names = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    return read_model_shape(SimpleNamespace(**{name: read_size(config, name) for name in names}))


@dataclass(frozen=True)
class ParameterCounts:
    """The parameters of a draft.

    Attributes:
        parameters: parameters in the draft's checkpoint.
        read: parameters that a step of one token reads, including what the draft borrows from the
            target, without embedding tables.
        num_layers: the draft's number of decoder layers.
        copied: parameters of the target's tables that training holds in addition, frozen.
    """

    parameters: int
    read: float
    num_layers: int
    copied: int = 0


Weigh = Callable[[str, nn.Parameter], float]  # (name, parameter) -> how much the parameter counts


def count_weights_read(
    model: PreTrainedModel,
    num_tokens: int = 1,
    weigh: Weigh = lambda name, parameter: parameter.numel(),
) -> float:
    """Return how many parameters one forward pass over `num_tokens` tokens reads from memory.

    The embedding table does not count, because a pass reads only a few of its rows. It does count
    if it is also the LM head, which is read as a whole.

    Args:
        model: the model.
        num_tokens: the number of tokens in the pass.
        weigh: a function that gets a parameter's name and the parameter, and returns how much the
            parameter counts: by default the number of its elements.
    """
    # Count all parameters, and subtract the embedding unless the LM head is the same matrix.
    embedding = model.get_input_embeddings().get_parameter("weight")
    head = model.get_output_embeddings().weight
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    unread = 0.0 if head is embedding else weigh(names[id(embedding)], embedding)
    return count_parameters_read(model, model.config.get_text_config(), num_tokens, weigh) - unread


def count_layer_weights_read(model: PreTrainedModel) -> float:
    """Return how many parameters one token is multiplied with before the LM head.

    These are the parameters that a pass over one token reads, without those of the LM head.
    """
    return float(count_weights_read(model) - model.get_output_embeddings().weight.numel())


def count_parameters_read(
    module: nn.Module,
    config: PreTrainedConfig,
    num_tokens: int = 1,
    weigh: Weigh = lambda name, parameter: parameter.numel(),
) -> float:
    """Return how many of a module's parameters one forward pass reads from memory.

    In a mixture of E experts, a pass reads only the experts that its tokens are sent to. If each of
    n tokens is sent to k experts, independently of the other tokens, the expected share of experts
    that are read is 1 - (1 - k/E)^n. For one token the share is k/E.

    Args:
        module: the module.
        config: the config that says how many experts there are.
        num_tokens: n, the number of tokens in the pass.
        weigh: a function that gets a parameter's name and the parameter, and returns how much the
            parameter counts: by default the number of its elements.
    """
    # Read how many experts there are, and how many a token is sent to. Models name the number of
    # experts differently. Without experts the share is 1.
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    stated_sizes = [size for size in (getattr(config, name, None) for name in names) if size]
    num_experts = stated_sizes[0] if stated_sizes else 1
    num_experts_per_token = getattr(config, "num_experts_per_tok", None) or num_experts
    share = 1 - (1 - num_experts_per_token / num_experts) ** num_tokens

    # Weigh each parameter, and count only the share of the experts that is read.
    weights = (
        ("experts" in name.split("."), weigh(name, parameter))
        for name, parameter in module.named_parameters()
    )
    return sum(weight * share if is_of_expert else weight for is_of_expert, weight in weights)


@dataclass(frozen=True)
class MethodFigures:
    """Acceptance and training data of a method, as others published them.

    Attributes:
        alphas: the lower and the higher acceptance rate; None if none is published.
        acceptance_source: where the rates are from.
        training_tokens: distinct tokens that such drafts are trained on; None if not published.
        training_source: where that number is from.
    """

    alphas: tuple[float, float] | None
    acceptance_source: str
    training_tokens: int | None
    training_source: str


@dataclass(frozen=True)
class ModelConfigInfo:
    """A target or a draft, described by its config.json.

    Attributes:
        name: what messages call it.
        key: the recipe key to name in errors.
        hub_id: its id on the Hub; None if it came from a folder.
        revision: its revision on the Hub.
        raw: the content of config.json.
        config: the same content, as transformers reads it.
        native_mtp: the key that says how many layers predict further tokens, and their number; None
            without such layers.
        trust_remote_code: whether its own code may run.
        stored_bytes: bytes of all weights, as the checkpoint's index or file says; None if neither
            is at hand.
    """

    name: str
    key: str
    hub_id: str | None
    revision: str | None
    raw: RawConfig
    config: PreTrainedConfig
    native_mtp: tuple[str, int] | None
    trust_remote_code: bool = False
    stored_bytes: int | None = None

    @property
    def text(self) -> PreTrainedConfig:
        """The language model's part of the config."""
        return self.config.get_text_config()

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the weights; None if config.json does not say it."""
        stated_dtype = self.config.dtype or self.text.dtype
        return stated_dtype if isinstance(stated_dtype, torch.dtype) else None

    @property
    def kind(self) -> str:
        """The architectures in config.json, or else the model type."""
        return ", ".join(self.raw.get("architectures") or []) or str(self.raw.get("model_type"))

    @property
    def calls_itself(self) -> str:
        """The names that config.json gives to its model, as one text in lower case.

        These are the architectures and the model type. Methods search the text for their own name,
        to recognize their drafts.
        """
        return " ".join(
            [*(self.raw.get("architectures") or []), str(self.raw.get("model_type"))]
        ).lower()

    @property
    def is_causal_lm(self) -> bool:
        """Whether config.json describes a causal language model that transformers can build.

        An encoder, for example, is not one.
        """
        # A model with code of its own says in `auto_map` that it is a causal language model.
        if "AutoModelForCausalLM" in self.raw.get("auto_map", {}):
            return True
        # An encoder-decoder is not a causal language model.
        if self.config.is_encoder_decoder:
            return False
        # A model that reads images contains a causal language model.
        if reads_images(self.config):
            return True

        # For any other model, transformers must list a causal language model with this type of
        # config. If config.json also names classes (`architectures`), one of them must be in the
        # list. But with a `text_config`, config.json may name any class: the language model is
        # then only a part of the model that the class stands for.
        listed_classes = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        class_names = set(self.raw.get("architectures") or [])
        has_fitting_class = (
            not class_names or "text_config" in self.raw or bool(class_names & listed_classes)
        )
        return has_fitting_class and type(self.config) in MODEL_FOR_CAUSAL_LM_MAPPING

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model on the meta device: it has all shapes, but takes no memory for weights.

        Raises:
            UserError: if config.json does not describe a causal language model, or if no model can
                be built from it.
        """
        if not self.is_causal_lm:
            raise UserError(self.key, got=f"{self.name}, a {self.kind}", expected=CAUSAL_LM)

        # transformers builds a model with a size of 0, which fails only when it computes. So check
        # the sizes first.
        for size_name in ("num_hidden_layers", "hidden_size", "vocab_size"):
            size = getattr(self.text, size_name, 0)
            if size < 1:
                raise UserError(
                    self.key, got=f"{self.name} with {size_name} {size}", expected="1 or more"
                )

        # Whatever exception the model's class raises, it means that the config is not usable.
        with (
            convert_errors(
                CLASS_ERRORS, self.key, f"{self.name}, of which no model can be built", CAUSAL_LM
            ),
            torch.device("meta"),
        ):
            model: PreTrainedModel = find_auto_class(self.config).from_config(
                self.config, trust_remote_code=self.trust_remote_code
            )
            return model

    @cached_property
    def parameters(self) -> int:
        """The number of the model's parameters."""
        return int(self.model.num_parameters())

    @cached_property
    def cache(self) -> CacheSize | None:
        """The size of the KV cache; None for a class that does not show it."""
        return cache_size(self.model)

    @property
    def quantization(self) -> RawConfig | None:
        """The settings of quantized weights; None if the weights are not quantized."""
        return {**self.raw, **(self.raw.get("text_config") or {})}.get("quantization_config")

    def itemsize(self, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of a weight that was not quantized.

        Args:
            dtype: the dtype of the weight; None for that of the checkpoint.
        """
        return (dtype or self.dtype or ASSUMED_DTYPE).itemsize

    @cached_property
    def converted(self) -> frozenset[str]:
        """The names of the parameters of `model` that are quantized in the checkpoint.

        These are all matrices, except for the embedding table, the LM head, and the modules that
        the config's `quantization_config` excludes.
        """
        if self.quantization is None:
            return frozenset()

        # compressed-tensors names the excluded modules under `ignore`, other formats under
        # `modules_to_not_convert`. Embedding and head count as not quantized. The name of a
        # parameter begins with that of its module.
        excluded_patterns = [
            *(self.quantization.get("modules_to_not_convert") or []),
            *(self.quantization.get("ignore") or []),
        ]
        excluded_patterns += ["*embed_tokens", "*lm_head"]
        matrices = (name for name, parameter in self.model.named_parameters() if parameter.ndim > 1)
        return frozenset(
            name
            for name in matrices
            if not any(fnmatch(name, f"{pattern}*") for pattern in excluded_patterns)
        )

    @cached_property
    def converted_itemsize(self) -> float:
        """The average number of bytes of a quantized weight, its share of the scales included.

        This is an estimate: (stored bytes - bytes of all unquantized weights) / number of quantized
        weights. Without quantized weights, or if the stored bytes are unknown, the result is the
        size of an unquantized weight.
        """
        quantized_names = self.converted
        if not quantized_names or self.stored_bytes is None:
            return self.itemsize()

        # Count the weights of `model`.
        sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        num_unquantized = sum(size for name, size in sizes.items() if name not in quantized_names)
        num_quantized = sum(sizes[name] for name in quantized_names)

        # The checkpoint may also have multi-token-prediction (MTP) layers, which `model` lacks.
        # Assume that each of them has as many quantized weights as the last layer of `model`, and
        # no unquantized weights.
        last_layer = f".layers.{self.text.num_hidden_layers - 1}."
        num_mtp_layers = self.native_mtp[1] if self.native_mtp else 0
        num_quantized += num_mtp_layers * sum(
            sizes[name] for name in quantized_names if last_layer in name
        )

        # The stored bytes that are left belong to quantized weights. The estimate may come out
        # above the size of an unquantized weight, which is impossible, so it is limited to that.
        quantized_bytes = self.stored_bytes - num_unquantized * self.itemsize()
        return float(min(self.itemsize(), quantized_bytes / num_quantized))

    def weigh(self, dtype: torch.dtype | None = None) -> Weigh:
        """Return a function that maps a parameter of `model` (name and tensor) to its bytes.

        Args:
            dtype: the dtype of the weights that are not quantized. None means the checkpoint's.
        """

        def count_bytes(name: str, parameter: nn.Parameter) -> float:
            # `converted` holds the names of the quantized parameters.
            is_quantized = name in self.converted
            itemsize = self.converted_itemsize if is_quantized else self.itemsize(dtype)
            return parameter.numel() * itemsize

        return count_bytes

    @cached_property
    def tiny_random(self) -> FrozenTarget | None:
        """A tiny target of the same class with random weights, to try things out.

        None if no such target can be made.

        Raises:
            UserError: if specdistill cannot decode with targets of this class.
        """
        return build_tiny_target(self.config, self.name, trust_remote_code=self.trust_remote_code)

    def build_on_tiny_target(self, build: Callable[[FrozenTarget], object]) -> FrozenTarget:
        """Check that a head can be built for this target, by building one for a tiny target.

        The tiny target has the same class, but random weights.

        Args:
            build: builds the head for a target. The head is not used further.

        Returns:
            The tiny target.

        Raises:
            UserError: if the head cannot be built, or if there is no tiny target of this class.
        """
        if self.tiny_random is None:
            raise UserError(
                self.key,
                got=(
                    f"{self.name}, a {type(self.model).__name__}, of which no small random model"
                    " can be built for a trial"
                ),
                expected="a model of another class, such as Llama or Qwen3",
            )
        build(self.tiny_random)
        return self.tiny_random

    @cached_property
    def weightless(self) -> "WeightlessTarget":
        """The target at its full size on the meta device, without weights."""
        # `WeightlessTarget` reads the property `tiny_random`. The first read builds the tiny model,
        # whose weights must have content. On the meta device they would have none. So read the
        # property before that device is set.
        _ = self.tiny_random
        with torch.device("meta"):
            return WeightlessTarget(self)


class WeightlessTarget(FrozenTarget):
    """A target at its full size whose tensors have no content.

    Its parts are found by the names that they have in a tiny random target of the same class.
    """

    def __init__(self, target: ModelConfigInfo) -> None:
        # The parts of the class are found on a tiny target, because this model cannot compute.
        tiny_target = target.build_on_tiny_target(lambda tiny_random: None)
        dtype = target.dtype or ASSUMED_DTYPE

        # Build the model itself on the meta device.
        model = find_auto_class(target.config).from_config(
            target.config, dtype=dtype, trust_remote_code=target.trust_remote_code
        )

        # All attributes are those of the tiny random target, except the ones that depend on the
        # size of the model. They are replaced here and below.
        names = {part: name for name, part in tiny_target.model.named_modules()}
        vars(self).update(
            vars(tiny_target),
            model=model.eval().requires_grad_(False),
            device=model.device,
            config=model.config.get_text_config(decoder=True),
        )
        self.backbone = model.get_submodule(names[tiny_target.backbone])
        self.layers = model.get_submodule(names[tiny_target.layers])
        self.norm = (
            None if tiny_target.norm is None else model.get_submodule(names[tiny_target.norm])
        )
        self.lm_head = model.get_output_embeddings()
        self.logits = replace(tiny_target.logits, linear=self.lm_head)
        self.hidden_size = int(self.config.hidden_size)
        self.vocab_size = int(self.config.vocab_size)

    def features(
        self, input_ids_BT: Tensor, aux_layers: Sequence[int], **options: object
    ) -> Features:
        """Return features with the right shapes, but without content.

        Args:
            input_ids_BT: [B, T], the ids of T tokens in B rows.
            aux_layers: the layers whose outputs are read besides the last hidden state.
            **options: not used.
        """
        shape = (*input_ids_BT.shape, self.hidden_size)
        dtype = self.lm_head.weight.dtype

        # One empty tensor stands for each auxiliary layer, and one for the last hidden state.
        *aux, last = (torch.empty(shape, dtype=dtype) for _ in range(len(aux_layers) + 1))
        return Features(tuple(aux), last)


@dataclass(frozen=True)
class PlannedDraft:
    """The draft of one method for a target.

    Attributes:
        parts: the parameters.
        shape: the shape of the draft's layers; None if it has none.
        vocabulary: tokens that the logits span.
        note: what the draft is, in words.
        published: acceptance and training data that others published.
        cache: the size of the KV cache; None if there is none, or if the class does not show it.
        recipe_keys: settings that a recipe made for another target must change for this one.
        counted_with: values of `draft:` with which the cost of training is counted, unless the
            recipe states others; for example {"ttt_steps": 1}.
        warnings: what contradicts the target's config.json.
        is_served: whether an engine can decode with the draft.
        build: builds the draft for the target at its full size, whose tensors may have no content
            (see specdistill.advice.plan.accounting).
    """

    parts: ParameterCounts
    shape: ModelShape | None
    vocabulary: int
    note: str
    published: MethodFigures
    cache: CacheSize | None = None
    recipe_keys: tuple[str, ...] = ()
    counted_with: Mapping[str, object] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    is_served: bool = True
    build: Callable[[FrozenTarget], nn.Module] | None = None


def plan_shape(
    target: ModelConfigInfo, draft_info: ModelConfigInfo | None, settings: Mapping[str, int | None]
) -> ModelShape:
    """Return the sizes of an existing head, or of the head that a recipe would train.

    Args:
        target: the target.
        draft_info: an existing head; None for the head of a recipe.
        settings: the keys of the recipe's section `draft:`.
    """
    if draft_info:
        return read_model_shape(draft_info.text)

    # Sizes that the recipe states replace the target's. A head has one layer by default.
    sizes = {name: settings.get(name) for name in ModelShape.__annotations__}
    stated_sizes = {name: size for name, size in sizes.items() if size is not None}
    return replace(read_head_shape(target.text), **{"num_layers": 1, **stated_sizes})


def plan_cache(shape: ModelShape, draft_info: ModelConfigInfo | None) -> CacheSize:
    """Return the size of the KV cache of a head with layers like Llama's.

    Args:
        shape: the sizes of the head.
        draft_info: an existing head, which may have sliding windows; None for a head that is still
            to be trained, which is planned without windows.
    """
    # A window limits the cache only if all layers have it.
    window = None
    if draft_info and set(draft_info.raw.get("layer_types") or []) == {"sliding_attention"}:
        window = draft_info.raw.get("sliding_window")
    return build_attention_cache_size(
        shape.num_layers, shape.num_key_value_heads, shape.head_dim, window
    )
