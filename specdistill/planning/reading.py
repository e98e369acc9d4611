"""What is known before anything is trained: a target and a draft by their config.json, and drafts that others published on the Hub."""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, get_session
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from transformers import AutoConfig, PreTrainedConfig

from specdistill.errors import UserError, refusing
from specdistill.files.documents import read_json
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import read_config
from specdistill.methods.load import OTHER_METHODS, other_method
from specdistill.methods.sizes import CAUSAL_LM, Described
from specdistill.repositories import HTTP_ERROR, fetch, resolve, split_gguf
from specdistill.targets.anatomy import CLASS_ERRORS
from specdistill.targets.files import INDEX, SINGLE, Shards
from specdistill.targets.loading import read_gguf_config

TIMEOUT_SECONDS = 5
DRAFT = "the config.json of an EAGLE head, an MTP layer or a causal language model"
# What drafts call themselves, special names first.
METHOD_PATTERNS = OTHER_METHODS | {
    "dflash": r"dflash",
    "dspark": r"dspark",
    "eagle3": r"eagle[-_ ]?3",
    "eagle": r"eagle",
    "mtp": r"(?<![a-z])mtp(?![a-z])",
    "pard": r"(?<![a-z])pard(?![a-z])",
    "draft_model": r"draft",
}
SEARCHES = ("eagle", "speculator", "draft", "dflash", "dspark", "mtp", "pard")


def read(
    name: str, *, key: str, revision: str | None = None, trust_remote_code: bool = False
) -> Described:
    """Read the config.json of `pico`, a folder or a Hub id, or the config of a GGUF file; `key` is what errors name.

    Raises UserError when there is none or it cannot be read, ResourceError when the Hub fails.
    """
    path, file = split_gguf(resolve(name, key))
    expected = "pico, a folder, a GGUF file or a Hub id"
    if file:
        folder = fetch(path, key=key, expected=expected, revision=revision, patterns=[file])
        config = read_gguf_config(folder, file, key=key, name=name)
        hub_id, revision = (None, None) if Path(path).is_dir() else (name, folder.name)
        stored = (folder / file).stat().st_size
        return Described(
            name, key, hub_id, revision, config.to_dict(), config, None, stored_bytes=stored
        )
    patterns = ["config.json", INDEX, *(["*.py"] if trust_remote_code else [])]
    folder = fetch(path, key=key, expected=expected, revision=revision, patterns=patterns)
    raw, methods = read_config(folder, key), [row.implementation() for row in METHODS.values()]
    nested = raw.get("transformer_layer_config") or raw.get(
        "model"
    )  # as speculators and vLLM wrap a head's
    with refusing((OSError, *CLASS_ERRORS), key, name, CAUSAL_LM):
        if str(raw.get("model_type")).startswith(
            "specdistill_"
        ):  # a draft in a layout of this project's own
            config = PreTrainedConfig.from_dict(raw.get("text_config") or raw)
        elif isinstance(nested, dict):
            config = AutoConfig.for_model(**nested)
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if not isinstance(config.get_text_config(), PreTrainedConfig):
            raise TypeError("text_config without a config")
    hub_id = None if Path(path).is_dir() else path
    names, stored_bytes = _stored(folder, key)
    layers = (method.native_layers(raw, names, config.get_text_config()) for method in methods)
    native_mtp, revision = next(filter(None, layers), None), folder.name if hub_id else None
    return Described(
        name, key, hub_id, revision, raw, config, native_mtp, trust_remote_code, stored_bytes
    )


def _stored(folder: Path, key: str) -> tuple[set[str], int | None]:
    """Names of a checkpoint's tensors, and their bytes, as far as an index or a file is there."""
    if not ((folder / INDEX).is_file() or (folder / SINGLE).is_file()):
        return set(), None
    shards = Shards.open(folder, key, complete=False)
    if (folder / INDEX).is_file():
        stated = read_json(folder / INDEX).get("metadata", {}).get("total_size")
        return set(shards.file_of), stated if isinstance(stated, int) else None
    return set(shards.file_of), shards.num_bytes


def method_of_config(draft: Described, target: Described) -> str:
    """The method a draft's config speaks of. Raises UserError where it is none that is decoded here."""
    if other := other_method(draft.raw):
        got = f"{draft.name}, a draft of method {other}, which is not decoded here yet"
        raise UserError("draft", got=got, expected=DRAFT)
    if found := next(
        (name for name, row in METHODS.items() if row.implementation().is_described(draft, target)),
        None,
    ):
        return found
    raise UserError("draft", got=f"{draft.name}, a {draft.kind}", expected=DRAFT)


def check_fit(draft: Described, target: Described, method: str) -> list[str]:
    """Raises UserError for another vocabulary, or for a draft of another width, depth or with layers that the target lacks; warns where
    padding may explain the difference.

    Only a whole model may be padded otherwise, and is as wide as it likes: other drafts share the target's embedding.
    """
    standalone, depth = METHODS[method].standalone, target.text.num_hidden_layers
    got, expected = draft.text.vocab_size, target.text.vocab_size
    if got != expected and not (standalone and abs(got - expected) <= 0.01 * expected):
        raise UserError(
            "draft",
            got=f"{draft.name} with a vocabulary of {got:,}",
            expected=f"{expected:,}, the target's",
        )
    if got != expected:
        what = f"{draft.name} has a vocabulary of {got:,}, the target of {expected:,}"
        return [f"{what}: taken for one tokenizer, padded differently"]
    if standalone:
        return []
    width = draft.raw.get("target_hidden_size") or draft.text.hidden_size
    if width != target.text.hidden_size:
        got = f"{draft.name} for a width of {width:,}"
        raise UserError("draft", got=got, expected=f"{target.text.hidden_size:,}, the target's")
    if (made_for := draft.raw.get("num_target_layers") or depth) != depth:
        raise UserError(
            "draft",
            got=f"{draft.name} for a target of {made_for} layers",
            expected=f"{depth}, the target's",
        )
    layers = getattr(
        METHODS[method].implementation().head_shape(draft.raw, depth), "aux_layers", ()
    )
    if beyond := [layer for layer in layers if not 0 <= layer <= depth]:
        got = f"{draft.name}, which reads the target after layers {', '.join(map(str, beyond))}"
        raise UserError("draft", got=got, expected=f"layers of its {depth}")
    return []


@dataclass(frozen=True)
class KnownDraft:
    """found_by: `card` when the repository names the target as its base model, `name` when only their names are alike."""

    repository: str
    method: str
    found_by: str
    downloads: int


def known_drafts(name: str, hub_id: str | None) -> tuple[list[KnownDraft], str | None]:
    """Drafts for a target, the most downloaded first, methods inferred from names and tags; and why the Hub was not asked, if it was not.

    Cards are searched for `hub_id`; names are compared here, since the Hub looks for one word: every word and number of the target's name
    must be in the draft's.
    """
    if name == "pico":
        return [], "not asked: pico ships with this package"
    api = HfApi()
    found: dict[str, KnownDraft] = {}
    try:
        # First with a time limit: the listing has none, and tries an unreachable Hub for half a minute.
        answer = get_session().get(
            f"{constants.ENDPOINT}/api/models", params={"limit": 1}, timeout=TIMEOUT_SECONDS
        )
        answer.raise_for_status()
        for search in SEARCHES:
            for base in [f"base_model:{hub_id}", None] if hub_id else [None]:
                models = api.list_models(
                    filter=base,
                    search=search,
                    sort="downloads",
                    limit=500,
                    expand=["downloads", "tags"],
                )
                for model in models:
                    method = infer_method(model.id, model.tags or [])
                    if method and model.id != hub_id and (base or names_target(model.id, name)):
                        known = KnownDraft(
                            model.id, method, "card" if base else "name", model.downloads or 0
                        )
                        found.setdefault(model.id, known)
    except (HfHubHTTPError, OfflineModeIsEnabled, HTTP_ERROR, ValueError) as error:
        return (
            [],
            f"not asked: {constants.ENDPOINT} did not answer ({str(error).splitlines()[0] or type(error).__name__})",
        )
    return sorted(found.values(), key=lambda draft: -draft.downloads), None


def infer_method(repository: str, tags: list[str]) -> str | None:
    """What a repository's name and tags say it is, the more special word counting; None where nothing sounds like a draft."""
    text = " ".join([repository, *tags]).lower()
    return next(
        (method for method, pattern in METHOD_PATTERNS.items() if re.search(pattern, text)), None
    )


def names_target(repository: str, target: str) -> bool:
    """Whether every word and number of the target's name is among the draft's: `EAGLE3-LLaMA3.1-Instruct-8B`, `Llama-3.1-8B-Instruct`."""
    words, wanted = (
        set(
            re.findall(
                r"\d+(?:\.\d+)?[bm]?|[a-z]+",
                re.sub(r"eagle[-_ ]?3(\.1)?", " ", name.split("/")[-1].lower()),
            )
        )
        for name in (repository, target)
    )
    return bool(wanted) and wanted <= words
