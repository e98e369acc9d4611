"""The frozen target: any Hugging Face causal language model, and the features a draft reads from it.

Shapes: B batch, T positions, D target hidden size, V vocabulary, A auxiliary layers.

Auxiliary layers are numbered "after L layers" everywhere inside specdistill: layer L is the residual stream after L decoder layers,
that is Hugging Face's `hidden_states[L]`, the input of decoder layer L, and for L = n the last layer's output before the final norm.
vLLM and speculators count the same way; SGLang and SpecForge count L - 1, which `specdistill.methods.eagle3.checkpoint` translates.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Cache, PreTrainedModel

from specdistill.engines.layout import engine_aux_layers
from specdistill.errors import UserError, nearest, one_line
from specdistill.hub import hub_errors
from specdistill.project import PICO


@dataclass(frozen=True)
class Features:
    """What one pass of the target yields.

    aux: A tensors [B, T, D], in the order the layers were asked for.
    last_hidden: [B, T, D], after the final norm: what the target's head is applied to.
    """

    aux: tuple[Tensor, ...]
    last_hidden: Tensor

    def first(self, count: int) -> "Features":
        """Those of the first `count` positions."""
        return Features(tuple(feature[:, :count] for feature in self.aux), self.last_hidden[:, :count])

    def at(self, positions: list[int]) -> "Features":
        """Those of some positions, in the order given."""
        return Features(tuple(feature[:, positions] for feature in self.aux), self.last_hidden[:, positions])

    def rows(self, index: Sequence[int]) -> "Features":
        """Those of some rows of the batch."""
        return Features(tuple(feature[index] for feature in self.aux), self.last_hidden[index])


class FrozenTarget:
    """A target in evaluation mode whose parameters take no gradient."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, *, name: str, revision: str | None = None) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.backbone: Any = model.get_decoder()
        self.lm_head: Any = model.get_output_embeddings()
        self.config: Any = model.config.get_text_config()

    @classmethod
    def load(
        cls,
        model: str,
        *,
        revision: str | None = None,
        adapter: str | None = None,
        dtype: str = "float32",
        attn: str = "sdpa",
        trust_remote_code: bool = False,
        device: str | torch.device | None = None,
    ) -> "FrozenTarget":
        """Load `pico`, a folder or a Hub id, with a LoRA adapter merged into it if one is named.

        Raises UserError for what is not a target or an adapter of it, ResourceError when the Hub fails.
        """
        loaded, tokenizer = read_causal_lm(
            resolve(model), revision=revision, dtype=dtype, attn=attn, trust_remote_code=trust_remote_code
        )
        if adapter is not None:
            loaded = with_adapter(loaded, adapter, base=model)
        name = model if adapter is None else f"{model} + {adapter}"
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(loaded.to(device), tokenizer, name=name, revision=revision or getattr(loaded.config, "_commit_hash", None))

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
        return len(self.backbone.layers)

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers keep a state that every token changes, instead of keys and values (linear attention, state spaces)."""
        return is_recurrent(self.config)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_length(self) -> int:
        """The longest text, prompt and continuation together, in tokens."""
        return int(self.config.max_position_embeddings)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text, from the generation config or else the model's."""
        ids = self.model.generation_config.eos_token_id
        ids = self.config.eos_token_id if ids is None else ids
        return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])

    def fingerprint(self) -> str:
        """A hash of the weights, so that what the target wrote is never mistaken for another target's."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:32]

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

        Packed rows: position ids that start again at 0 separate the documents, which transformers turns into the right mask for each
        kind of layer. With `past_key_values` the tokens continue the cached ones, and the cache grows. An `attention_mask` is the whole
        truth about what each token sees: [B, 1, T, S] over cached and new positions, added to the scores; or one for each kind of layer.
        """
        with _capture(self.backbone, aux_layers) as captured:
            output = self.backbone(
                input_ids=input_ids_BT,
                position_ids=position_ids_BT,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                use_cache=past_key_values is not None,
            )
        return Features(tuple(captured[layer] for layer in aux_layers), output.last_hidden_state)

    def logits(self, last_hidden_BTD: Tensor) -> Tensor:
        """The target's head: [B, T, V]."""
        logits: Tensor = self.lm_head(last_hidden_BTD)
        return logits


def read_causal_lm(
    path: str,
    *,
    key: str = "target.model",
    revision: str | None = None,
    dtype: str = "float32",
    attn: str = "sdpa",
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer from a folder or the Hub; `key` is the recipe key that errors name.

    Raises UserError when files are missing or broken, or when weights are not those that the config asks for; ResourceError when the
    Hub fails.
    """
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    expected = "pico, a folder with config, weights and tokenizer, or a Hub id"
    try:
        with hub_errors(key, path, expected=expected):
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, dtype), attn_implementation=attn, output_loading_info=True, **options
            )
    except SafetensorError as error:
        raise UserError(key, got=f"{path}: {error}", expected="whole safetensors files") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(key, got=f"{path} ({str(error).splitlines()[0]})", expected=expected) from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # transformers makes them up
        raise UserError(key, got=f"{path} without {', '.join(missing[:3])}", expected="every weight that its config asks for")
    return model, tokenizer


def read_tokenizer(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> tuple[Any, int]:
    """A target's tokenizer and the longest text that it reads, in tokens, without its weights: they are in another process.

    Raises UserError when there is no such target, ResourceError when the Hub fails.
    """
    path, options = resolve(model), {"revision": revision, "trust_remote_code": trust_remote_code}
    expected = "pico, a folder with config and tokenizer, or a Hub id"
    try:
        with hub_errors("target.model", path, expected=expected):
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
            config = AutoConfig.from_pretrained(path, **options).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError("target.model", got=f"{path} ({str(error).splitlines()[0]})", expected=expected) from error
    return tokenizer, int(config.max_position_embeddings)


def with_adapter(model: PreTrainedModel, adapter: str, *, base: str) -> PreTrainedModel:
    """The model with a peft LoRA adapter merged into its weights (arXiv 2106.09685); `base` is the name the model was loaded by.

    An adapter names its base: the same name, or the same folder or repository name elsewhere, will do. Raises UserError for another base,
    for another kind of adapter, and for one whose tensors are not exactly those that the model takes.
    """
    key, expected = "target.adapter", "the folder or Hub id of a LoRA adapter"
    try:
        with hub_errors(key, adapter, expected=expected):
            config = peft.PeftConfig.from_pretrained(adapter)
            weights = peft.utils.load_peft_weights(adapter, device="cpu")
    except SafetensorError as error:
        raise UserError(key, got=f"{adapter}: {error}", expected="a whole safetensors file") from error
    except (OSError, ValueError) as error:
        got = f"{adapter} ({str(error).splitlines()[0]})"
        raise UserError(key, got=got, expected=expected) from error
    if config.peft_type != "LORA":
        raise UserError(key, got=f"{adapter}, a {config.peft_type} adapter", expected="a LoRA adapter")
    named = config.base_model_name_or_path
    if named and Path(named).name.lower() != Path(resolve(base)).name.lower():
        raise UserError(key, got=f"{adapter}, an adapter of {named}", expected=f"an adapter of {base}")
    config.inference_mode, config.base_model_name_or_path = True, None  # peft would warn of the name it was loaded by
    try:
        adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        got = f"{adapter} ({one_line(str(error))[:160]})"
        raise UserError(key, got=got, expected=f"an adapter of {base}") from error
    taken = {name: tensor.shape for name, tensor in peft.get_peft_model_state_dict(adapted).items()}
    given = {name: tensor.shape for name, tensor in weights.items()}
    if taken != given:
        name = sorted({name for name, _ in taken.items() ^ given.items()})[0]
        shapes = (tuple(shape[name]) if name in shape else "nothing" for shape in (given, taken))
        raise UserError(key, got=f"{adapter} with {next(shapes)} for {name}", expected=f"{next(shapes)}, as {base} takes")
    peft.set_peft_model_state_dict(adapted, weights)
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged


RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # transformers' names of layers with a state


def is_recurrent(text_config: Any) -> bool:
    """Whether a text config names a layer with a state."""
    return bool(RECURRENT & set(getattr(text_config, "layer_types", None) or ()))


def resolve(model: str, key: str = "target.model") -> str:
    """`pico` is the folder that ships with the package; everything else is itself. Raises UserError for a folder that is not there."""
    if model == "pico":
        return str(PICO)
    if not Path(model).is_dir() and (model.startswith((".", "/", "~")) or (model.count("/") != 1 and "/" in model)):
        raise UserError(key, got=f"{model}, which is no folder", expected="pico, a folder or a Hub id")
    if "/" not in model and not Path(model).is_dir():
        raise UserError(key, got=model, expected="pico, a folder or a Hub id", nearest=nearest(model, ["pico"]))
    return model


def default_aux_layers(num_layers: int) -> list[int]:
    """The engines' default; for targets too shallow for it, three different layers spread over the depth."""
    layers = engine_aux_layers(num_layers)
    return layers if layers == sorted(set(layers)) else sorted({min(1, num_layers), num_layers // 2, max(num_layers - 1, 0)})


def check_aux_layers(aux_layers: Sequence[int] | None, num_layers: int) -> list[int]:
    """The layers to read: those asked for, or the default. Raises UserError when one lies outside 0..n."""
    layers = default_aux_layers(num_layers) if aux_layers is None else list(aux_layers)
    if not layers or not all(0 <= layer <= num_layers for layer in layers) or len(set(layers)) != len(layers):
        raise UserError("draft.aux_layers", got=layers, expected=f"different layers in 0..{num_layers} (the target's depth)")
    return layers


@contextmanager
def _capture(backbone: Any, aux_layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Keep the input of just the layers asked for; the input of the final norm stands for "after all layers"."""
    captured: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            captured[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    modules = [*backbone.layers, backbone.norm]
    handles = [modules[layer].register_forward_pre_hook(keep(layer), with_kwargs=True) for layer in aux_layers]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
