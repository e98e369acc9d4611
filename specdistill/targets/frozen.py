"""Load the frozen target, and compute the features that a draft reads from it.

A target can be any causal language model of transformers.

Shapes: B batch, T positions, D target hidden size, V vocabulary, A auxiliary layers.

Auxiliary layers are numbered "after L layers" everywhere inside specdistill. Layer L is the
residual stream after L decoder layers: transformers' `hidden_states[L]`, which is the input of
decoder layer L. For L = n it is the output of the last layer before the final norm. vLLM and
speculators count the same way. SGLang and SpecForge count L - 1, which
`specdistill.methods.eagle3.checkpoint` translates.
"""

import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from specdistill.common.errors import UserError, convert_errors
from specdistill.targets.anatomy import CLASS_ERRORS, examine_model, find_auto_class
from specdistill.targets.cache import is_recurrent
from specdistill.targets.files import TargetFiles, TargetIdentity
from specdistill.targets.loading import (
    end_tokens,
    find_max_length,
    is_plain,
    merge_adapter,
    read_causal_lm,
)
from specdistill.targets.packed_rows import (
    BackboneInputs,
    Documents,
    PackingMethod,
    choose_packing,
    find_maskless_configs,
    replace_attention,
    run_unchanged,
)
from specdistill.targets.sharding import count_processes

# The values of `target.device_map` with which accelerate spreads a model over all devices of a
# process.
SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")
# The most compiled graphs of one function, where torch's default is eight. There is one for each K
# and size of a KV cache, and one for each step of an unroll, in training and in evaluation.
MAX_GRAPHS = 128
# The numbers by which `build_tiny_target` divides widths, in the order in which they are tried. 24
# and 12 are for sizes that have a factor of three. 1 keeps the sizes as they are.
DIVISORS = (64, 32, 16, 24, 12, 8, 4, 2, 1)
# The least hidden size and the most parameters (1 GB in float32) of a tiny target. A narrower one
# has heads of few dimensions, and a larger one takes long to build.
MIN_WIDTH = 64
MAX_TINY_PARAMETERS = 2**28
# Smaller numbers of a config are not widths, but counts or kernel sizes, and stay as they are.
MIN_DIVIDED_SIZE = 16
# The keys of a config whose numbers are counts or positions, not widths.
NO_WIDTHS = re.compile(
    r"(^|_)(num|n)_\w*(head|layer|group)|heads$|layers?$|position|ctx|period|interval|offset|top_?k"
)


@dataclass(frozen=True)
class Features:
    """The hidden states of one pass of the target.

    Attributes:
        aux: A tensors [B, T, D], in the order in which the layers were asked for.
        last_hidden: [B, T, D], after the final norm: the input of the target's head.
    """

    aux: tuple[Tensor, ...]
    last_hidden: Tensor

    @classmethod
    def from_tensors(cls, tensors: Iterable[Tensor]) -> "Features":
        """Build features from the auxiliary layers in order, followed by the last hidden state."""
        *aux, last_hidden = tensors
        return cls(tuple(aux), last_hidden)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The hidden states [B, T, D]: those of the auxiliary layers, then the last ones.

        A feature store keeps them in this order, in one tensor [B, A + 1, T, D].
        """
        return (*self.aux, self.last_hidden)

    @classmethod
    def concatenate(cls, parts: Sequence["Features"]) -> "Features":
        """Concatenate the features of all parts along the position axis (copies)."""
        # `zip` groups the tensors of the parts by layer.
        return cls.from_tensors(
            torch.cat(layer_tensors, dim=1)
            for layer_tensors in zip(*(part.tensors for part in parts), strict=True)
        )

    @classmethod
    def pad_and_stack(cls, rows: Sequence["Features"]) -> "Features":
        """Stack B rows [1, T, D] of different lengths into one batch, padded at the end with 0."""
        # `zip` groups the tensors of the rows by layer.
        return cls.from_tensors(
            pad_sequence([feature[0] for feature in layer_tensors], batch_first=True)
            for layer_tensors in zip(*(row.tensors for row in rows), strict=True)
        )

    def first(self, count: int) -> "Features":
        """Return the features of the first `count` positions."""
        return self.from_tensors(feature[:, :count] for feature in self.tensors)

    def at(self, position_BF: Tensor) -> "Features":
        """Return the features at F positions of each of B rows, in the order of the positions."""
        # Row numbers [B, 1] and positions [B, F] together index [B, F, D] of [B, T, D].
        row_B1 = torch.arange(len(position_BF), device=position_BF.device).unsqueeze(1)
        return self.from_tensors(feature[row_B1, position_BF] for feature in self.tensors)

    def rows(self, index: Sequence[int]) -> "Features":
        """Return the features of the rows of the batch that have these numbers."""
        # The numbers are copied to the device once, and not once for each tensor.
        index_B = torch.tensor(index, device=self.last_hidden.device)
        return self.from_tensors(feature[index_B] for feature in self.tensors)


class FrozenTarget:
    """A target in evaluation mode whose parameters take no gradient."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        name: str,
        revision: str | None = None,
        files: TargetFiles | None = None,
        quantization: str | None = None,
    ) -> None:
        """Freeze a model, and find its parts.

        Args:
            model: the model.
            tokenizer: its tokenizer; None for a random target.
            name: what errors and reports call the target.
            revision: the commit of a Hub id.
            files: the files that it was loaded from; None for a model made in memory.
            quantization: the kind of quantization that the weights were rounded to when they were
                loaded; None for none.

        Raises:
            UserError: for a model that computes in a way that is not known here.
        """
        # Keep the model, without dropout and gradients, and where it came from.
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.files = files
        self.quantization = quantization

        # Find its parts and sizes. The config of a model for images contains one for text.
        self.config = model.config.get_text_config(decoder=True)
        anatomy = examine_model(self.model, name)
        self.is_recurrent = is_recurrent(self.config)
        self.is_plain = is_plain(self.model)
        self.backbone = anatomy.backbone
        self.layers = anatomy.layers
        self.norm = anatomy.norm
        self.device: torch.device = self.model.device
        self.logits = anatomy.head
        self.lm_head = anatomy.head.linear
        self.hidden_size = int(self.config.hidden_size)
        self.vocab_size = int(self.config.vocab_size)
        self.num_layers = len(self.layers)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        revision: str | None = None,
        adapter: str | Sequence[str] | None = None,
        quantization: str | None = None,
        device_map: str | None = None,
        layers_on_disk: bool = False,
        **options: Any,
    ) -> "FrozenTarget":
        """Load a target, and merge a LoRA adapter into it if one is named.

        Every process of a launch has to call this.

        Args:
            model: a folder, a GGUF file, a Hub id, or `pico` for the small target in this package.
            revision: the revision of a Hub id; None for the default.
            adapter: folder or Hub id of a LoRA adapter.
            quantization: the kind of quantization that weights are rounded to.
            device_map: `auto` for all devices of one process, or one device.
            layers_on_disk: leave the decoder layers in their files, and read them whenever they are
                run. They are loaded anyway if weights have to be converted, merged or spread.
            **options: further options of `read_causal_lm`. With `shard=layers` each process holds a
                part of the decoder layers (`specdistill.targets.sharding`).

        Raises:
            UserError: if the model or the adapter cannot be loaded, or not in this way.
            ResourceError: when the Hub fails.
        """
        # Load the model. The layers cannot stay on the disk if an adapter is merged into them, or
        # if accelerate places them, as it does for a model that is spread over devices.
        _check_device_map(device_map)
        files = TargetFiles(model, revision, adapter)
        loaded, tokenizer = read_causal_lm(
            files.name,
            revision=revision,
            quantize=quantization,
            device_map=device_map or ("cuda" if torch.cuda.is_available() else "cpu"),
            layers_on_disk=layers_on_disk and adapter is None and device_map not in SPREAD,
            **options,
        )
        # accelerate leaves a weight that fits on no device on the meta device.
        if any(
            module.weight.is_meta
            for module in (loaded.get_input_embeddings(), loaded.get_output_embeddings())
        ):
            raise UserError(
                "target.device_map",
                got=f"{device_map}, which leaves the embedding or the head of {model} on no device",
                expected="devices with enough memory, or target.shard=layers",
            )

        # Merge an adapter, which makes it another target with a name of its own.
        if adapter is not None:
            loaded = merge_adapter(loaded, files.adapter, base=model)
        name = model if adapter is None else f"{model} + {adapter}"
        # The copy of a GGUF file has no commit, so the commit of the file itself is taken.
        revision = revision or getattr(loaded.config, "_commit_hash", None) or files.commit
        files = replace(files, revision=revision)
        return cls(
            loaded, tokenizer, name=name, revision=revision, files=files, quantization=quantization
        )

    @property
    def dtype(self) -> str:
        """The dtype of the features, and of the weights unless they are quantized."""
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    @property
    def num_parameters(self) -> int:
        """The number of the target's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def max_length(self) -> int:
        """The longest sequence that the target reads, prompt and generation together, in tokens."""
        return find_max_length(self.config, self.tokenizer)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids of the tokens that end a generation.

        The generation config names them. If it names none, the model's config does.
        """
        generation = self.model.generation_config
        return frozenset(end_tokens(self.config if generation.eos_token_id is None else generation))

    def tensor(self, name: str) -> Tensor:
        """Return the weight of the token embedding or of the LM head.

        Args:
            name: `embed_tokens.weight` or `lm_head.weight`.
        """
        module = (
            self.model.get_input_embeddings() if name == "embed_tokens.weight" else self.lm_head
        )
        weight: Tensor = module.weight
        return weight

    @property
    def embedding_scale(self) -> float:
        """The factor by which the model multiplies the rows of its embedding table.

        For Gemma this is the square root of the hidden size, for most classes 1.
        """
        # Classes of transformers keep the factor in one of these two attributes, as a number or as
        # a buffer.
        module = self.model.get_input_embeddings()
        scale = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", 1.0))
        return 1.0 if scale is None else float(scale)

    @property
    def identity(self) -> TargetIdentity:
        """The identity of the target: its name and hashes of its files (`TargetFiles.identity`).

        A model that was made in memory has no files, and so no identity.
        """
        assert self.files is not None, f"{self.name} was not loaded from files"
        return self.files.identity

    def features(
        self,
        input_ids_BT: Tensor,
        aux_layers: Sequence[int],
        *,
        position_ids_BT: Tensor | None = None,
        documents: Documents | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        past_key_values: Cache | None = None,
    ) -> Features:
        """Run one pass of the decoder layers, without the head, and return their hidden states.

        All layers are run, because the last hidden state is always returned. If processes share the
        target, each has to make as many passes as the others.

        Args:
            input_ids_BT: token ids [B, T].
            aux_layers: the auxiliary layers whose hidden states are returned.
            position_ids_BT: [B, T]. In packed rows, position ids that start again at 0 separate
                the documents (`specdistill.targets.packed_rows`).
            documents: the places of these documents; None: find them in the position ids, which
                makes the host wait for the device.
            attention_mask: replaces the causal mask. It is [B, 1, T, S] over the S cached and new
                positions, and is added to the scores; or a dictionary with one such mask for each
                kind of layer.
            past_key_values: a cache of the tokens before these. The new tokens are added to it.

        Returns:
            The features, in the dtype in which they are computed.

        Raises:
            UserError: if an auxiliary layer does not have the shape of the last hidden state.
        """
        # With a cache or a given mask, this is a pass of decoding, whose rows are not packed.
        if attention_mask is not None or past_key_values is not None:
            backbone_inputs = {
                "position_ids": position_ids_BT,
                "attention_mask": attention_mask,
                "past_key_values": past_key_values,
            }
            # Without a given mask, the new tokens are the last ones of a growing cache. On a GPU
            # this is plain causality, which needs no mask tensor. A cache of a fixed size, which
            # transformers calls compileable, keeps its mask.
            can_omit_mask = (
                attention_mask is None
                and past_key_values is not None
                and not past_key_values.is_compileable
            )
            with replace_attention(self._maskless if can_omit_mask else ()):
                return self._run_layers(aux_layers, {"input_ids": input_ids_BT, **backbone_inputs})

        # Without position ids, each row is one document.
        if position_ids_BT is None:
            return self._run_layers(aux_layers, {"input_ids": input_ids_BT})

        # Packed rows are given to the model in the way that keeps their documents apart. This may
        # join all rows to one, so the features get their shape [B, T, D] back.
        inputs = {"input_ids": input_ids_BT, "position_ids": position_ids_BT}
        documents = Documents.from_positions(position_ids_BT) if documents is None else documents
        features = self._packing(
            self.model, inputs, documents, partial(self._run_layers, aux_layers)
        )
        return Features.from_tensors(
            feature.view(*input_ids_BT.shape, -1) for feature in features.tensors
        )

    @cached_property
    def _maskless(self) -> list[PreTrainedConfig]:
        """The configs of the model's parts that can attend without a mask tensor.

        A config names the attention function of the model, or of a part of it. During a pass that
        continues a KV cache, `features` sets this name to `attend`, a function that needs no mask
        tensor. The list is empty on a CPU. It is also empty if `attend` cannot compute the model's
        attention (see `find_maskless_configs`).
        """
        return find_maskless_configs(self.model) if self.device.type == "cuda" else []

    def compile(self, **options: Any) -> None:
        """Compile each layer with options of `torch.compile`.

        Before that, choose how packed rows are given to the model (`_packing`). This choice runs
        the layers on a few short inputs. Compiled layers would first be compiled for the shapes of
        these inputs, which training does not use.
        """
        _ = self._packing  # The property is computed when it is first read.
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward, **options)

    @cached_property
    def _packing(self) -> PackingMethod:
        """The function that gives packed rows to the model so that documents stay apart.

        If no such function works for the model, rows are given to it as they are.
        """
        return choose_packing(self.model) or run_unchanged

    def _run_layers(self, aux_layers: Sequence[int], inputs: BackboneInputs) -> Features:
        """Run the decoder layers on inputs, and return the features on the device of the inputs.

        Args:
            aux_layers: the auxiliary layers whose hidden states are returned.
            inputs: the inputs of the model's backbone, by name.

        Raises:
            UserError: if a layer does not return hidden states of the usual shape.
        """
        # Move the inputs to the target, which may be on another device, or on several.
        device = inputs["input_ids"].device
        moved_inputs = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }

        # Run the layers, and move the features back.
        with capture(self.layers, aux_layers) as captured:
            has_cache = inputs.get("past_key_values") is not None
            output = self.backbone(**moved_inputs, use_cache=has_cache)
        aux = tuple(captured[layer].to(device) for layer in aux_layers)
        last_hidden = output.last_hidden_state.to(device)

        # Layers with several residual streams have hidden states of another shape, which drafts
        # cannot read.
        other_shapes = {tuple(feature.shape) for feature in aux} - {tuple(last_hidden.shape)}
        if other_shapes:
            raise UserError(
                "draft.aux_layers",
                got=f"{self.name}, whose layers return {other_shapes.pop()} for an input of"
                f" {tuple(last_hidden.shape)}",
                expected=(
                    "a target whose layers have one residual stream, or a draft without auxiliary"
                    " layers"
                ),
            )
        return Features(aux, last_hidden)


def allow_graphs() -> None:
    """Let torch compile up to MAX_GRAPHS graphs of one function, instead of eight."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)


def compile_layers(train: Mapping[str, object], target: FrozenTarget, objective: Any) -> None:
    """Compile target and draft for training if `train.torch_compile` asks for it.

    The layers of target and draft are compiled one by one, and so is the loss. No other code is
    compiled.

    Layers of a class share a graph, so a target of 80 layers compiles as fast as one of two layers
    (regional compilation). Training unrolls a head: it runs several draft steps in a row, each on
    the head's own output of the step before. Each step attends to one entry more than the step
    before, so a layer of the head has one graph for each step. Generation and decoding are not
    compiled, because their lengths grow token by token; they set
    `torch.compiler.set_stance("force_eager")`. The hooks of a layer, which read features or gather
    weights, stay outside of its graph.

    Args:
        train: the recipe's section `train`.
        target: the target.
        objective: the objective, with the draft's layers.
    """
    if not train.get("torch_compile"):
        return
    allow_graphs()  # torch's default, eight graphs of one function, is too few for a long unroll
    # torch's DDPOptimizer would cut the graphs of layers at the borders of gradient buckets.
    torch._dynamo.config.optimize_ddp = False
    # dynamo reads `.grad` of tensors that are no leaves, and torch warns about each such read.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")

    # Compile the layers of the target, those of the draft, and the loss.
    options: dict[str, Any] = {
        "backend": train.get("torch_compile_backend") or "inductor",
        "mode": train.get("torch_compile_mode"),
    }
    target.compile(**options)
    for layer in objective.layers:
        layer.forward = torch.compile(layer.forward, **options)
    objective.compute_row_losses = torch.compile(objective.compute_row_losses, **options)


def _check_device_map(device_map: str | None) -> None:
    """Raise UserError if `target.device_map` cannot be used by this launch or on this machine.

    Args:
        device_map: a way of accelerate to spread a model over all devices, or the name of one
            device; None for the default.
    """
    key = "target.device_map"
    if device_map in SPREAD and count_processes() > 1:
        raise UserError(
            key,
            got=f"{device_map} with {count_processes()} processes, which would take each other's"
            " devices",
            expected="null (and target.shard=layers if the model does not fit on one device)",
        )
    if device_map is not None and device_map not in SPREAD:
        # Allocating an empty tensor shows whether the device exists. A torch without CUDA raises
        # AssertionError.
        with convert_errors(
            (RuntimeError, AssertionError),
            key,
            device_map,
            f"{', '.join(SPREAD)}, or a device of this machine",
        ):
            torch.empty(0, device=device_map)


@contextmanager
def capture(layers: nn.ModuleList, layer_indices: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Capture the hidden states of some layers while a model runs inside the block.

    Args:
        layers: the n decoder layers.
        layer_indices: numbers L from 0 to n. L asks for the hidden states after L layers.

    Yields:
        A dictionary that is filled while the model runs: L -> the input of layer L, or for L = n
        the output of the last layer.
    """
    captured: dict[int, Tensor] = {}

    # Hidden states are the first argument or the keyword `hidden_states` of a layer. Some layers
    # return them alone, some in a tuple with other results.
    def keep_input(
        layer: int, _module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> None:
        """Keep the hidden states that a layer gets, as first argument or as keyword."""
        captured[layer] = args[0] if args else kwargs["hidden_states"]

    def keep_output(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        """Keep the hidden states that the last layer returns."""
        captured[len(layers)] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks:
        for layer in layer_indices:
            if layer < len(layers):
                hooks.enter_context(
                    layers[layer].register_forward_pre_hook(
                        partial(keep_input, layer), with_kwargs=True
                    )
                )
            else:
                hooks.enter_context(layers[-1].register_forward_hook(keep_output))
        yield captured


def build_tiny_target(
    config: PreTrainedConfig, name: str, *, trust_remote_code: bool = False
) -> FrozenTarget | None:
    """Build a tiny target with random weights, of the same class as a config.

    With it, the class can be tried out before the real weights are fetched. Widths are divided, and
    counts (layers, heads, groups) are kept, so that relations between sizes still hold, such as
    hidden size = heads · head size. Not every class works with such small widths, so several are
    tried, the narrowest first.

    Args:
        config: the target's config.
        name: the name of the real target, for errors.
        trust_remote_code: run the repository's own code.

    Returns:
        The tiny target; None if it cannot be built with any width.

    Raises:
        UserError: if models can be built, but `FrozenTarget` refuses all of them.
    """
    # Try the narrowest model first, then wider ones, until one can be built and run.
    width = config.get_text_config(decoder=True).hidden_size
    last_error: UserError | None = None
    for divisor in DIVISORS:
        if divisor > 1 and width // divisor < MIN_WIDTH:
            continue
        options = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
        try:
            # The model is built without content first, to count its parameters.
            small_config = (
                type(config).from_dict(_divide_value(config.to_dict(), name="", divisor=divisor))
                if divisor > 1
                else copy.deepcopy(config)
            )
            with torch.device("meta"):
                num_parameters = (
                    find_auto_class(small_config)
                    .from_config(small_config, **options)
                    .num_parameters()
                )
            # Smaller divisors would make the model even larger.
            if num_parameters > MAX_TINY_PARAMETERS:
                break

            # Build it with random weights, and run it on two tokens: some classes accept sizes that
            # do not fit each other, and fail only in their forward pass. The sizes of the config
            # itself (divisor 1) are taken to fit.
            with torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(0)
                model = find_auto_class(small_config).from_config(small_config, **options).eval()
                if divisor > 1:
                    model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
        except CLASS_ERRORS:  # The sizes do not fit each other, so the next divisor is tried.
            continue

        # The parts of the model must be found, too; otherwise the next divisor is tried.
        try:
            return FrozenTarget(model, None, name=name)
        except UserError as error:
            last_error = error
    if last_error is not None:
        raise last_error
    return None


def _divide_value(value: Any, name: str, divisor: int) -> Any:
    """Return a value of a config, changed for a narrower model.

    Widths are divided and rounded up, token ids become 0, and all other values stay as they are.

    Args:
        value: the value, or a dictionary of values.
        name: the key of the value; empty for the whole config.
        divisor: the number that widths are divided by.
    """
    if isinstance(value, dict):
        return {key: _divide_value(part, str(key), divisor) for key, part in value.items()}
    # Token ids (keys with `token_id` or `token_ids`) could be outside the divided vocabulary. A
    # divisor of 1 keeps the vocabulary, and so the ids.
    if divisor > 1 and "token_i" in name and value is not None:
        return [0] if isinstance(value, list) else 0
    if isinstance(value, list) and name.endswith("_section"):
        # These are the sections of a rotary embedding's width.
        return [-(-part // divisor) for part in value]
    if type(value) is int and value >= MIN_DIVIDED_SIZE and not NO_WIDTHS.search(name):
        return -(-value // divisor)
    return value
