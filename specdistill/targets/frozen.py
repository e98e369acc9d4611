"""The frozen target: any Hugging Face causal language model, as it is loaded, and the features a draft reads from it.

Shapes: B batch, T positions, D target hidden size, V vocabulary, A auxiliary layers.

Auxiliary layers are numbered "after L layers" everywhere inside specdistill: layer L is the residual stream after L decoder layers,
that is Hugging Face's `hidden_states[L]`, the input of decoder layer L, and for L = n the last layer's output before the final norm.
vLLM and speculators count the same way; SGLang and SpecForge count L - 1, which `specdistill.methods.eagle3.checkpoint` translates.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Cache, PreTrainedModel

from specdistill.errors import UserError, one_line
from specdistill.hub import hub_errors, resolve
from specdistill.progress import hide_bars_of_transformers
from specdistill.targets.anatomy import examine, is_recurrent
from specdistill.targets.files import TargetFiles
from specdistill.targets.identity import TargetIdentity


@dataclass(frozen=True)
class Features:
    """Hidden states of one pass of the target.

    aux: A tensors [B, T, D], in the order the layers were asked for.
    last_hidden: [B, T, D], after the final norm: the input of the target's head.
    """

    aux: tuple[Tensor, ...]
    last_hidden: Tensor

    def first(self, count: int) -> "Features":
        """Of the first `count` positions."""
        return Features(tuple(feature[:, :count] for feature in self.aux), self.last_hidden[:, :count])

    def at(self, positions: list[int]) -> "Features":
        """Of some positions, in the order given."""
        return Features(tuple(feature[:, positions] for feature in self.aux), self.last_hidden[:, positions])

    def rows(self, index: Sequence[int]) -> "Features":
        """Of some rows of the batch."""
        return Features(tuple(feature[index] for feature in self.aux), self.last_hidden[index])


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
    ) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.files = files
        self.config: Any = model.config.get_text_config(decoder=True)
        anatomy = examine(self.model, name)
        self.is_recurrent = is_recurrent(self.config)
        self.backbone, self.layers, self.norm = anatomy.backbone, anatomy.layers, anatomy.norm
        self.logits, self.lm_head = anatomy.head, anatomy.head.linear
        self.hidden_size, self.vocab_size = int(self.config.hidden_size), int(self.config.vocab_size)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        revision: str | None = None,
        adapter: str | None = None,
        dtype: str = "float32",
        attn: str | None = None,
        trust_remote_code: bool = False,
        device: str | torch.device | None = None,
    ) -> "FrozenTarget":
        """Load `pico`, a folder or a Hub id, and merge a LoRA adapter into it if one is named.

        Raises UserError if it is no target or no adapter of it, ResourceError when the Hub fails.
        """
        loaded, tokenizer = read_causal_lm(
            resolve(model), revision=revision, dtype=dtype, attn=attn, trust_remote_code=trust_remote_code
        )
        if adapter is not None:
            loaded = with_adapter(loaded, adapter, base=model)
        name = model if adapter is None else f"{model} + {adapter}"
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        revision = revision or getattr(loaded.config, "_commit_hash", None)
        files = TargetFiles.of(model, revision, adapter)
        return cls(loaded.to(device), tokenizer, name=name, revision=revision, files=files)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> str:
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def max_length(self) -> int:
        """The longest sequence, prompt and generation together, in tokens."""
        return max_length(self.config, self.tokenizer)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a generation, from the generation config or else the model's."""
        ids = self.model.generation_config.eos_token_id
        ids = self.config.eos_token_id if ids is None else ids
        return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])

    def tensor(self, name: str) -> Tensor:
        """`embed_tokens.weight` or `lm_head.weight`."""
        module = self.model.get_input_embeddings() if name == "embed_tokens.weight" else self.lm_head
        weight: Tensor = module.weight
        return weight

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
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        past_key_values: Cache | None = None,
    ) -> Features:
        """One pass of the decoder layers, without the head.

        Packed rows: position ids that start again at 0 separate the documents, from which transformers derives the mask of each kind of
        layer. With `past_key_values` the tokens continue the cached ones, and the cache grows. An `attention_mask` replaces the causal
        mask: [B, 1, T, S] over cached and new positions, added to the scores; or a dictionary with one for each kind of layer.
        """
        with _capture(self.layers, aux_layers) as captured:
            output = self.backbone(
                input_ids=input_ids_BT,
                position_ids=position_ids_BT,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                use_cache=past_key_values is not None,
            )
        aux, last_hidden = tuple(captured[layer] for layer in aux_layers), output.last_hidden_state
        if other := {tuple(feature.shape) for feature in aux} - {tuple(last_hidden.shape)}:
            got = f"{self.name}, whose layers pass on {other.pop()} for {tuple(last_hidden.shape)}"
            raise UserError(
                "draft.aux_layers", got=got, expected="layers of one residual stream, or a head that reads none of them"
            )
        return Features(aux, last_hidden)


def max_length(text_config: Any, tokenizer: Any) -> int:
    """Tokens of a target's context. Models without positions, or with relative ones, have no such number: their tokenizer names one."""
    return int(getattr(text_config, "max_position_embeddings", None) or tokenizer.model_max_length)


@contextmanager
def _capture(layers: nn.ModuleList, wanted: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Capture the inputs of the layers asked for, and the last layer's output."""
    captured: dict[int, Tensor] = {}

    def keep_input(layer: int, _module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        captured[layer] = args[0] if args else kwargs["hidden_states"]

    def keep_output(_module: nn.Module, _args: Any, output: Any) -> None:
        captured[len(layers)] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks:
        for layer in wanted:
            if layer < len(layers):
                hooks.enter_context(layers[layer].register_forward_pre_hook(partial(keep_input, layer), with_kwargs=True))
            else:
                hooks.enter_context(layers[-1].register_forward_hook(keep_output))
        yield captured


@contextmanager
def _reading(key: str, name: str, expected: str) -> Iterator[None]:
    """Raises UserError for missing or broken files of what `name` stands for, ResourceError when the Hub fails."""
    try:
        with hub_errors(key, name, expected=expected):
            yield
    except SafetensorError as error:
        raise UserError(key, got=f"{name}: {error}", expected="whole safetensors files") from error
    except ImportError as error:  # of an attention implementation, a quantization or remote code
        got = f"{name} ({one_line(str(error))})"
        raise UserError(key, got=got, expected="packages that are installed, or another target.attn") from error
    except (OSError, ValueError, RuntimeError, TypeError, LookupError, AttributeError, AssertionError) as error:
        # The last four are transformers' own, of a config.json that lacks what its class reads.
        got = f"{name} ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        raise UserError(key, got=got, expected=expected) from error


def read_causal_lm(
    path: str,
    *,
    key: str = "target.model",
    revision: str | None = None,
    dtype: str = "float32",
    attn: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer from a folder or the Hub; `key` is the recipe key that errors name.

    Raises UserError for missing or broken files and missing weights, ResourceError when the Hub fails.
    """
    hide_bars_of_transformers()
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    expected = "pico, a folder with config, weights and tokenizer, or a Hub id"
    model_options = {"dtype": getattr(torch, dtype), "attn_implementation": attn, "output_loading_info": True, **options}
    with _reading(key, path, expected):
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, **model_options)
    model, report = loaded
    if missing := sorted(report["missing_keys"]):  # transformers would initialize them
        raise UserError(key, got=f"{path} without {', '.join(missing[:3])}", expected="every weight that its config asks for")
    return model, tokenizer


def read_tokenizer(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> tuple[Any, int]:
    """A target's tokenizer and the length of its context in tokens, without its weights, which a server holds.

    Raises UserError when there is no such target, ResourceError when the Hub fails.
    """
    path, options = resolve(model), {"revision": revision, "trust_remote_code": trust_remote_code}
    with _reading("target.model", path, "pico, a folder with config and tokenizer, or a Hub id"):
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        config = AutoConfig.from_pretrained(path, **options).get_text_config()
    return tokenizer, max_length(config, tokenizer)


def with_adapter(model: PreTrainedModel, adapter: str, *, base: str) -> PreTrainedModel:
    """The model with a peft LoRA adapter merged into its weights (arXiv 2106.09685); `base` is the name the model was loaded by.

    An adapter names its base: of a path or Hub id the last part must agree. Raises UserError for another base, for another kind of
    adapter, and for tensors other than the model takes.
    """
    key = "target.adapter"
    with _reading(key, adapter, "the folder or Hub id of a LoRA adapter"):
        config = peft.PeftConfig.from_pretrained(adapter)
        weights = peft.utils.load_peft_weights(adapter, device="cpu")
    if config.peft_type != "LORA":
        raise UserError(key, got=f"{adapter}, a {config.peft_type} adapter", expected="a LoRA adapter")
    named = config.base_model_name_or_path
    if named and Path(named).name.lower() != Path(resolve(base)).name.lower():
        raise UserError(key, got=f"{adapter}, an adapter of {named}", expected=f"an adapter of {base}")
    config.inference_mode, config.base_model_name_or_path = True, None  # peft would warn about the name of the base
    try:
        adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        raise UserError(key, got=f"{adapter} ({one_line(str(error))[:160]})", expected=f"an adapter of {base}") from error
    taken = {name: tensor.shape for name, tensor in peft.get_peft_model_state_dict(adapted).items()}
    given = {name: tensor.shape for name, tensor in weights.items()}
    if taken != given:
        name = sorted({name for name, _ in taken.items() ^ given.items()})[0]
        shapes = (tuple(shape[name]) if name in shape else "nothing" for shape in (given, taken))
        raise UserError(key, got=f"{adapter} with {next(shapes)} for {name}", expected=f"{next(shapes)}, as {base} takes")
    peft.set_peft_model_state_dict(adapted, weights)
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged
