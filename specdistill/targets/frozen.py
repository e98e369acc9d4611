"""The frozen target: any Hugging Face causal language model, as it is loaded, and the features a draft reads from it.

Shapes: B batch, T positions, D target hidden size, V vocabulary, A auxiliary layers.

Auxiliary layers are numbered "after L layers" everywhere inside specdistill: layer L is the residual stream after L decoder layers,
that is Hugging Face's `hidden_states[L]`, the input of decoder layer L, and for L = n the last layer's output before the final norm.
vLLM and speculators count the same way; SGLang and SpecForge count L - 1, which `specdistill.methods.eagle3.checkpoint` translates.
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
from transformers import Cache, PreTrainedModel

from specdistill.errors import UserError, refusing
from specdistill.targets.anatomy import CLASS_ERRORS, auto_class, examine
from specdistill.targets.cache import is_recurrent
from specdistill.targets.files import TargetFiles, TargetIdentity
from specdistill.targets.loading import (
    end_tokens,
    is_plain,
    max_length,
    read_causal_lm,
    with_adapter,
)
from specdistill.targets.packed_rows import (
    BackboneInputs,
    Documents,
    PackingMethod,
    as_they_are,
    attending,
    maskless_configs,
    packing,
)
from specdistill.targets.sharding import num_processes

SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")
# Of one function: for each K and size of a KV cache; for each step of an unroll, in training and in evaluation.
MOST_GRAPHS = 128
# Of tiny random targets.
DIVISORS = (64, 32, 16, 8, 4, 2, 1)
LEAST_WIDTH, MOST_PARAMETERS = 64, 2**28
LEAST_DIVIDED = 16  # smaller numbers are no widths
NO_WIDTHS = re.compile(
    r"(^|_)(num|n)_\w*(head|layer|group)|heads$|layers?$|position|ctx|period|interval|offset|top_?k"
)


@dataclass(frozen=True)
class Features:
    """Hidden states of one pass of the target.

    aux: A tensors [B, T, D], in the order the layers were asked for.
    last_hidden: [B, T, D], after the final norm: the input of the target's head.
    """

    aux: tuple[Tensor, ...]
    last_hidden: Tensor

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> "Features":
        """From what `tensors` gives."""
        *aux, last_hidden = tensors
        return cls(tuple(aux), last_hidden)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The auxiliary layers, then the last hidden state. In one tensor [B, A + 1, T, D] they are what a feature store keeps."""
        return (*self.aux, self.last_hidden)

    @classmethod
    def joined(cls, parts: Sequence["Features"]) -> "Features":
        """Of the positions of all parts, one after the other; copied."""
        return cls.of(
            torch.cat(of_layer, dim=1)
            for of_layer in zip(*(part.tensors for part in parts), strict=True)
        )

    @classmethod
    def padded(cls, rows: Sequence["Features"]) -> "Features":
        """Of B rows of their own lengths, each [1, T, D], in one batch as long as the longest."""
        layers = zip(*(row.tensors for row in rows), strict=True)
        return cls.of(
            pad_sequence([feature[0] for feature in of_layer], batch_first=True)
            for of_layer in layers
        )

    def first(self, count: int) -> "Features":
        """Of the first `count` positions."""
        return self.of(feature[:, :count] for feature in self.tensors)

    def at(self, position_BF: Tensor) -> "Features":
        """Of some positions of each row, in the order given."""
        row_B1 = torch.arange(len(position_BF), device=position_BF.device).unsqueeze(1)
        return self.of(feature[row_B1, position_BF] for feature in self.tensors)

    def rows(self, index: Sequence[int]) -> "Features":
        """Of some rows of the batch."""
        index_B = torch.tensor(index, device=self.last_hidden.device)  # copied to the device once
        return self.of(feature[index_B] for feature in self.tensors)


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
        """quantization: that its weights were rounded to when they were loaded."""
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.files = files
        self.quantization = quantization
        self.config: Any = model.config.get_text_config(decoder=True)
        anatomy = examine(self.model, name)
        self.is_recurrent, self.is_plain = is_recurrent(self.config), is_plain(self.model)
        self.backbone, self.layers, self.norm = anatomy.backbone, anatomy.layers, anatomy.norm
        self.device: torch.device = self.model.device
        self.logits, self.lm_head = anatomy.head, anatomy.head.linear
        self.hidden_size, self.vocab_size = (
            int(self.config.hidden_size),
            int(self.config.vocab_size),
        )
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
        """Load `pico`, a folder, a GGUF file or a Hub id, and merge a LoRA adapter into it if one is named.

        Every process of a launch has to call it. options: of `read_causal_lm`, of which `shard=layers` gives each process a part of them
        (`specdistill.targets.sharding`). device_map: `auto` for all devices of one process, or one device.
        layers_on_disk: load what lies around the decoder layers alone, and read those whenever they are run. They are loaded anyway
        where weights have to be converted, merged or spread.
        Raises UserError if it is no target or no adapter of it, or if it cannot be held so; ResourceError when the Hub fails.
        """
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
        if any(
            module.weight.is_meta
            for module in (loaded.get_input_embeddings(), loaded.get_output_embeddings())
        ):
            got = f"{device_map}, which leaves the embedding or the head of {model} on no device"
            raise UserError(
                "target.device_map",
                got=got,
                expected="devices with enough memory, or target.shard=layers",
            )
        if adapter is not None:
            loaded = with_adapter(loaded, files.adapter, base=model)
        name = model if adapter is None else f"{model} + {adapter}"
        revision = revision or getattr(loaded.config, "_commit_hash", None)
        files = replace(files, revision=revision)
        return cls(
            loaded, tokenizer, name=name, revision=revision, files=files, quantization=quantization
        )

    @property
    def dtype(self) -> str:
        """Of the features; of the weights, too, unless they were rounded to a `quantization`."""
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def max_length(self) -> int:
        """The longest sequence, prompt and generation together, in tokens."""
        return max_length(self.config, self.tokenizer)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a generation, from the generation config or else the model's."""
        generation = self.model.generation_config
        return frozenset(end_tokens(self.config if generation.eos_token_id is None else generation))

    def tensor(self, name: str) -> Tensor:
        """`embed_tokens.weight` or `lm_head.weight`."""
        module = (
            self.model.get_input_embeddings() if name == "embed_tokens.weight" else self.lm_head
        )
        return module.weight

    @property
    def identity(self) -> TargetIdentity:
        """From hashes of its files (see `TargetFiles.identity`), which a model made in memory has none of."""
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
        """One pass of the decoder layers, without the head. Of a target that processes share, each makes as many passes as the others.

        All layers are run, since the last hidden state is always read; features are in the dtype that they are computed in.

        Packed rows: position ids that start again at 0 separate the documents (`specdistill.targets.packed_rows`). `documents`, if they
        are known, says the same; they are looked for otherwise, for which the host waits.
        With `past_key_values` the tokens continue the cached ones, and the cache grows. An `attention_mask` replaces the causal
        mask: [B, 1, T, S] over cached and new positions, added to the scores; or a dictionary with one for each kind of layer.
        """
        if attention_mask is not None or past_key_values is not None:
            given = {
                "position_ids": position_ids_BT,
                "attention_mask": attention_mask,
                "past_key_values": past_key_values,
            }
            grows = (
                attention_mask is None
                and past_key_values is not None
                and not past_key_values.is_compileable
            )
            with attending(self._maskless if grows else ()):
                return self._pass(aux_layers, {"input_ids": input_ids_BT, **given})
        if position_ids_BT is None:
            return self._pass(aux_layers, {"input_ids": input_ids_BT})
        inputs = {"input_ids": input_ids_BT, "position_ids": position_ids_BT}
        documents = Documents.of(position_ids_BT) if documents is None else documents
        features = self._packing(self.model, inputs, documents, partial(self._pass, aux_layers))
        shape = (*input_ids_BT.shape, -1)
        return Features.of(feature.view(shape) for feature in features.tensors)

    @cached_property
    def _maskless(self) -> list[Any]:
        """The configs whose attention goes without a mask over a KV cache: on a GPU, if the class allows it."""
        return maskless_configs(self.model) if self.device.type == "cuda" else []

    def compile(self, **options: Any) -> None:
        """Compile each layer, with options of `torch.compile`. How rows are packed is tried before, on shapes that do not come again."""
        _ = self._packing
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward, **options)

    @cached_property
    def _packing(self) -> PackingMethod:
        return packing(self.model) or as_they_are

    def _pass(self, aux_layers: Sequence[int], inputs: BackboneInputs) -> Features:
        device = inputs[
            "input_ids"
        ].device  # where the features are wanted; a target may be elsewhere, or on several devices
        moved = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        with capture(self.layers, aux_layers) as captured:
            output = self.backbone(**moved, use_cache=inputs.get("past_key_values") is not None)
        aux, last_hidden = (
            tuple(captured[layer].to(device) for layer in aux_layers),
            output.last_hidden_state.to(device),
        )
        if other := {tuple(feature.shape) for feature in aux} - {tuple(last_hidden.shape)}:
            got = f"{self.name}, whose layers pass on {other.pop()} for {tuple(last_hidden.shape)}"
            raise UserError(
                "draft.aux_layers",
                got=got,
                expected="layers of one residual stream, or a head that reads none of them",
            )
        return Features(aux, last_hidden)


def allow_graphs() -> None:
    """MOST_GRAPHS of one function, where torch would give up after eight."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)


def compile_layers(train: Mapping[str, Any], target: FrozenTarget, objective: Any) -> None:
    """`train.torch_compile`: the layers of target and draft are compiled one by one, and the loss of a chunk's logits; the rest is not.

    Layers of a class share a graph, so a target of 80 layers compiles as fast as one of two (regional compilation). A draft's layer has a
    graph for each step of the unroll, which reads one chain entry more than the step before. Elementwise operations become few kernels.
    Only training is compiled: generation and decoding, whose lengths grow token by token, set `torch.compiler.set_stance("force_eager")`.
    A layer's hooks, which read features or gather weights, stay outside of its graph.
    """
    if not train.get("torch_compile"):
        return
    allow_graphs()
    torch._dynamo.config.optimize_ddp = (
        False  # it would cut layers at the borders of gradient buckets
    )
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf"
    )  # dynamo looks at it
    backend = train.get("torch_compile_backend") or "inductor"
    options: dict[str, Any] = {"backend": backend, "mode": train.get("torch_compile_mode")}
    target.compile(**options)
    for layer in objective.layers:
        layer.forward = torch.compile(layer.forward, **options)
    objective.row_losses = torch.compile(objective.row_losses, **options)


def _check_device_map(device_map: str | None) -> None:
    key = "target.device_map"
    if device_map in SPREAD and num_processes() > 1:
        got = (
            f"{device_map} with {num_processes()} processes, which would take each other's devices"
        )
        raise UserError(
            key, got=got, expected="null, and target.shard=layers where one device is too small"
        )
    if device_map is not None and device_map not in SPREAD:
        expected = f"{', '.join(SPREAD)}, or a device of this machine"
        with refusing(
            (RuntimeError, AssertionError), key, device_map, expected
        ):  # the latter of a torch without CUDA
            torch.empty(0, device=device_map)


@contextmanager
def capture(layers: nn.ModuleList, wanted: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Capture the inputs of the layers asked for, and the last layer's output."""
    captured: dict[int, Tensor] = {}

    def keep_input(
        layer: int, _module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> None:
        captured[layer] = args[0] if args else kwargs["hidden_states"]

    def keep_output(_module: nn.Module, _args: Any, output: Any) -> None:
        captured[len(layers)] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks:
        for layer in wanted:
            if layer < len(layers):
                hooks.enter_context(
                    layers[layer].register_forward_pre_hook(
                        partial(keep_input, layer), with_kwargs=True
                    )
                )
            else:
                hooks.enter_context(layers[-1].register_forward_hook(keep_output))
        yield captured


def tiny_random_target(
    config: Any, name: str, *, trust_remote_code: bool = False
) -> FrozenTarget | None:
    """A tiny random target of the class of `config`, under the target's own name; None where no size can be made.

    What the class computes can so be tried before its weights are there. Widths are divided, and counts (layers, heads, groups) are
    kept, so that what a class asks of its sizes still holds: hidden size = heads · head size. Which classes can be made so small is
    tried too: a few sizes, the narrowest first.

    Raises UserError as loading the target would, when every size is refused.
    """
    width = config.get_text_config(decoder=True).hidden_size
    refused: UserError | None = None
    for divisor in DIVISORS:
        if divisor > 1 and width // divisor < LEAST_WIDTH:
            continue
        options = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
        try:
            small = (
                type(config).from_dict(_divided(config.to_dict(), "", divisor))
                if divisor > 1
                else copy.deepcopy(config)
            )
            with torch.device("meta"):
                num_parameters = auto_class(small).from_config(small, **options).num_parameters()
            if num_parameters > MOST_PARAMETERS:
                break
            with torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(0)
                model = auto_class(small).from_config(small, **options).eval()
                if divisor > 1:
                    model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
        except CLASS_ERRORS:  # sizes that do not go together: another divisor is tried
            continue
        try:
            return FrozenTarget(model, None, name=name)
        except UserError as error:
            refused = error
    if refused is not None:
        raise refused
    return None


def _divided(value: Any, name: str, divisor: int) -> Any:
    """A value of a config, by its name: widths divided and rounded up, token ids 0, all else as it is."""
    if isinstance(value, dict):
        return {key: _divided(part, str(key), divisor) for key, part in value.items()}
    if divisor > 1 and "token_i" in name and value is not None:
        return [0] if isinstance(value, list) else 0
    if isinstance(value, list) and name.endswith("_section"):  # of a rotary embedding's width
        return [-(-part // divisor) for part in value]
    if type(value) is int and value >= LEAST_DIVIDED and not NO_WIDTHS.search(name):
        return -(-value // divisor)
    return value
