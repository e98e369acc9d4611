"""The frozen target: any Hugging Face causal language model, and the features a draft reads from it.

Shapes: B batch, T positions, D target hidden size, V vocabulary, A auxiliary layers.

Auxiliary layers are numbered "after L layers" everywhere inside specdistill: layer L is the residual stream after L decoder layers,
that is Hugging Face's `hidden_states[L]`, the input of decoder layer L, and for L = n the last layer's output before the final norm.
vLLM and speculators count the same way; SGLang and SpecForge count L - 1, which `specdistill.drafts.checkpoint` translates.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, PreTrainedModel

from specdistill.errors import ResourceError, UserError, nearest
from specdistill.project import PICO


@dataclass(frozen=True)
class Features:
    """What one pass of the target yields.

    aux: A tensors [B, T, D], in the order the layers were asked for.
    last_hidden: [B, T, D], after the final norm: what the target's head is applied to.
    """

    aux: tuple[Tensor, ...]
    last_hidden: Tensor


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
        dtype: str = "float32",
        attn: str = "sdpa",
        trust_remote_code: bool = False,
        device: str | torch.device | None = None,
    ) -> "FrozenTarget":
        """Load `pico`, a folder or a Hub id. Raises UserError for what is not a target, ResourceError when the Hub fails."""
        path = resolve(model)
        options = {"revision": revision, "trust_remote_code": trust_remote_code}
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, dtype), attn_implementation=attn, **options
            )
        except (HfHubHTTPError, OfflineModeIsEnabled) as error:
            raise ResourceError(
                f"target.model: could not fetch {model} from the Hub ({error})",
                next_step="check the id, HF_TOKEN and the network",
            ) from error
        except (OSError, ValueError, HFValidationError) as error:
            expected = "pico, a folder with config, weights and tokenizer, or a Hub id"
            raise UserError("target.model", got=f"{model} ({str(error).splitlines()[0]})", expected=expected) from error
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(loaded.to(device), tokenizer, name=model, revision=revision or getattr(loaded.config, "_commit_hash", None))

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
        past_key_values: Cache | None = None,
    ) -> Features:
        """One pass of the decoder layers, without the head.

        Packed rows: position ids that start again at 0 separate the documents, which transformers turns into the right mask for each
        kind of layer. With `past_key_values` the tokens continue the cached ones, and the cache grows.
        """
        with _capture(self.backbone, aux_layers) as captured:
            output = self.backbone(
                input_ids=input_ids_BT,
                position_ids=position_ids_BT,
                past_key_values=past_key_values,
                use_cache=past_key_values is not None,
            )
        return Features(tuple(captured[layer] for layer in aux_layers), output.last_hidden_state)

    def logits(self, last_hidden_BTD: Tensor) -> Tensor:
        """The target's head: [B, T, V]."""
        logits: Tensor = self.lm_head(last_hidden_BTD)
        return logits


def resolve(model: str) -> str:
    """`pico` is the folder that ships with the package; everything else is itself. Raises UserError for a folder that is not there."""
    if model == "pico":
        return str(PICO)
    if not Path(model).is_dir() and (model.startswith((".", "/", "~")) or (model.count("/") != 1 and "/" in model)):
        raise UserError("target.model", got=f"{model}, which is no folder", expected="pico, a folder or a Hub id")
    if "/" not in model and not Path(model).is_dir():
        raise UserError("target.model", got=model, expected="pico, a folder or a Hub id", nearest=nearest(model, ["pico"]))
    return model


def engine_aux_layers(num_layers: int) -> list[int]:
    """Low, middle and high: [2, n//2, n-3] after-L-layers, which every engine assumes when a checkpoint does not say."""
    return [2, num_layers // 2, num_layers - 3]


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
