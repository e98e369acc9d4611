"""What a config.json says about a target or a draft, before any weight is read; models are built on the meta device to be counted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdistill.errors import UserError, one_line
from specdistill.hub import fetch, resolve
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import read_config
from specdistill.methods.mtp.checkpoint import ARCHITECTURE as MTP
from specdistill.methods.mtp.tensor_names import NATIVE_KEYS

CAUSAL_LM = "the config.json of a causal language model"


@dataclass(frozen=True)
class Described:
    """A config as the file has it (`raw`) and as transformers reads it (`config`; `text`: the language model's part).

    key: what errors name. hub_id: None for what came from a folder. dtype: of the weights, None where the file does not say.
    """

    name: str
    key: str
    hub_id: str | None
    revision: str | None
    raw: dict[str, Any]
    config: Any
    trust_remote_code: bool = False

    @property
    def text(self) -> Any:
        return self.config.get_text_config()

    @property
    def dtype(self) -> torch.dtype | None:
        stated = self.config.dtype or self.text.dtype
        return stated if isinstance(stated, torch.dtype) else None

    @property
    def kind(self) -> str:
        return ", ".join(self.raw.get("architectures") or []) or str(self.raw.get("model_type"))

    @property
    def is_causal_lm(self) -> bool:
        """Whether AutoModelForCausalLM takes it, and the file does not call itself something else."""
        if "AutoModelForCausalLM" in self.raw.get("auto_map", {}):
            return True
        named = set(self.raw.get("architectures") or [])
        # The language model of one for text and images is a causal one, whatever the whole is called.
        right = not named or "text_config" in self.raw or bool(named & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
        return right and type(self.config) in MODEL_FOR_CAUSAL_LM_MAPPING and not self.config.is_encoder_decoder

    @property
    def native_mtp(self) -> tuple[str, int] | None:
        """The key that says how many layers predict further tokens, and how many; only what the file itself says counts."""
        parts = (self.raw, self.raw.get("text_config") or {})
        return next(((key, part[key]) for part in parts for key in NATIVE_KEYS if part.get(key)), None)

    def model(self) -> Any:
        """The model on the meta device: every shape, no weights. Raises UserError for what is no causal language model."""
        if not self.is_causal_lm:
            raise UserError(self.key, got=f"{self.name}, a {self.kind}", expected=CAUSAL_LM)
        for size in ("num_hidden_layers", "hidden_size", "vocab_size"):
            if (got := getattr(self.text, size)) < 1:
                raise UserError(self.key, got=f"{self.name} with {size} {got}", expected="1 or more")
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(self.config, trust_remote_code=self.trust_remote_code)
        except (ValueError, TypeError, AttributeError, RuntimeError, ImportError) as error:
            got = f"{self.name}, of which no model can be built ({one_line(str(error))[:160]})"
            raise UserError(self.key, got=got, expected=CAUSAL_LM) from error


def read(name: str, *, key: str, revision: str | None = None, trust_remote_code: bool = False) -> Described:
    """Read the config.json of `pico`, a folder or a Hub id; `key` is what errors name.

    Raises UserError when there is none or it cannot be read, ResourceError when the Hub fails.
    """
    path = resolve(name, key)
    patterns = ["config.json", *(["*.py"] if trust_remote_code else [])]
    folder = fetch(path, key=key, expected="pico, a folder or a Hub id", revision=revision, patterns=patterns)
    if not (folder / "config.json").is_file():
        raise UserError(key, got=f"{name}, which has no config.json", expected="a folder or a Hub id with one")
    raw = read_config(folder, key)
    try:
        config: Any = (
            PreTrainedConfig.from_dict(raw["text_config"])  # of the target that this project's own MTP drafts are for
            if raw.get("architectures") == [MTP]
            else AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise UserError(key, got=f"{name} ({one_line(str(error))[:160]})", expected=CAUSAL_LM) from error
    hub_id = None if Path(path).is_dir() else path
    return Described(name, key, hub_id, folder.name if hub_id else None, raw, config, trust_remote_code)


def method_of_config(draft: Described, target: Described) -> str:
    """The method a draft's config speaks of; SafeAILab's heads call themselves plain Llama, but their sizes tell. Else raises UserError."""
    named = " ".join(draft.raw.get("architectures") or []).lower()
    if "eagle3" in named or {"draft_vocab_size", "eagle_config"} & draft.raw.keys():
        return "eagle3"
    same_width = getattr(draft.text, "hidden_size", None) == getattr(target.text, "hidden_size", 0)
    if "eagle" in named or (draft.is_causal_lm and same_width and draft.text.num_hidden_layers == 1):
        return "eagle"
    if "mtp" in named:
        return "mtp"
    if draft.is_causal_lm:
        return "draft_model"
    expected = "the config.json of an EAGLE head, an MTP layer or a causal language model"
    raise UserError("draft", got=f"{draft.name}, a {draft.kind}", expected=expected)


def check_fit(draft: Described, target: Described, method: str) -> list[str]:
    """Raises UserError for another vocabulary, or for a head of another width; warns where padding may explain the difference.

    Only a draft model may be padded otherwise: heads share the target's embedding.
    """
    is_head = METHODS[method].artifact != "model"
    got, expected = draft.text.vocab_size, target.text.vocab_size
    width = draft.raw.get("target_hidden_size") or draft.text.hidden_size
    if got != expected and (is_head or abs(got - expected) > 0.01 * expected):
        raise UserError("draft", got=f"{draft.name} with a vocabulary of {got:,}", expected=f"{expected:,}, the target's")
    if got != expected:
        what = f"{draft.name} has a vocabulary of {got:,}, the target of {expected:,}"
        return [f"{what}: taken for one tokenizer, padded differently"]
    if is_head and width != target.text.hidden_size:
        got = f"{draft.name} for a width of {width:,}"
        raise UserError("draft", got=got, expected=f"{target.text.hidden_size:,}, the target's")
    return []
