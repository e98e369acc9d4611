"""Read what is known before anything is trained.

That is the config.json of a target and of a draft, and the drafts that others published on the Hub.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, get_session
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from transformers import AutoConfig, PreTrainedConfig

from specdistill.common.documents import read_json
from specdistill.common.errors import UserError, convert_errors
from specdistill.common.repositories import (
    HTTP_ERROR,
    fetch,
    find_connection_failure,
    resolve,
    split_gguf,
)
from specdistill.methods import METHODS
from specdistill.methods.checkpoint import read_config
from specdistill.methods.load import OTHER_METHODS, find_foreign_method
from specdistill.methods.sizes import CAUSAL_LM, ModelConfigInfo
from specdistill.targets.anatomy import CLASS_ERRORS
from specdistill.targets.files import INDEX, SINGLE, Shards
from specdistill.targets.loading import read_gguf_config

# Seconds after which an unreachable Hub is given up. The plan itself does not need it.
TIMEOUT_SECONDS = 5
DRAFT = "the config.json of an EAGLE head, an MTP layer or a causal language model"
# Patterns of the names that drafts have, by method. Special names come first.
METHOD_PATTERNS = OTHER_METHODS | {
    "dflash": r"dflash",
    "dspark": r"dspark",
    "eagle3": r"eagle[-_ ]?3",
    "eagle": r"eagle",
    "mtp": r"(?<![a-z])mtp(?![a-z])",
    "pard": r"(?<![a-z])pard(?![a-z])",
    "draft_model": r"draft",
}

# The words that the Hub is searched for. Each takes one request, or two with a Hub id.
SEARCH_WORDS = ("eagle", "speculator", "draft", "dflash", "dspark", "mtp", "pard")


def read_model_config(
    name: str, *, key: str, revision: str | None = None, trust_remote_code: bool = False
) -> ModelConfigInfo:
    """Read the config.json of `pico`, a folder or a Hub id, or the config of a GGUF file.

    Args:
        name: `pico`, a folder, a GGUF file or a Hub id.
        key: the recipe key that errors name.
        revision: of a Hub id; None for the default.
        trust_remote_code: run the repository's own code.

    Returns:
        The model, described by its config.

    Raises:
        UserError: if there is no config, or it cannot be read.
        ResourceError: when the Hub fails.
    """
    path, file = split_gguf(resolve(name, key))
    expected = "pico, a folder, a GGUF file or a Hub id"

    # A GGUF file holds its config itself. Only the file's header is read.
    if file:
        folder = fetch(path, key=key, expected=expected, revision=revision, patterns=[file])
        config = read_gguf_config(folder, file, key=key, name=name)
        hub_id, revision = (None, None) if Path(path).is_dir() else (name, folder.name)
        return ModelConfigInfo(
            name,
            key,
            hub_id,
            revision,
            config.to_dict(),
            config,
            None,
            stored_bytes=(folder / file).stat().st_size,
        )

    # Otherwise the config and, where weights are stored, the index are enough.
    folder = fetch(
        path,
        key=key,
        expected=expected,
        revision=revision,
        patterns=["config.json", INDEX, *(["*.py"] if trust_remote_code else [])],
    )
    raw = read_config(folder, key)
    methods = [row.load() for row in METHODS.values()]
    # speculators and vLLM wrap the config of a head in one of these sections.
    nested = raw.get("transformer_layer_config") or raw.get("model")
    with convert_errors((OSError, *CLASS_ERRORS), key, name, CAUSAL_LM):
        # This is a draft in a layout of this project.
        if str(raw.get("model_type")).startswith("specdistill_"):
            config = PreTrainedConfig.from_dict(raw.get("text_config") or raw)
        elif isinstance(nested, dict):
            config = AutoConfig.for_model(**nested)
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if not isinstance(config.get_text_config(), PreTrainedConfig):
            raise TypeError("text_config without a config")

    # The sizes of the stored tensors tell how large quantized weights are.
    hub_id = None if Path(path).is_dir() else path
    names, stored_bytes = _read_tensor_sizes(folder, key)

    # Ask each method whether the checkpoint has layers that it drafts with.
    layers = (
        method.advice.find_native_layers(raw, names, config.get_text_config()) for method in methods
    )
    native_mtp = next(filter(None, layers), None)
    revision = folder.name if hub_id else None
    return ModelConfigInfo(
        name, key, hub_id, revision, raw, config, native_mtp, trust_remote_code, stored_bytes
    )


def _read_tensor_sizes(folder: Path, key: str) -> tuple[set[str], int | None]:
    """Return the names of a checkpoint's tensors, and their total bytes.

    Both are known if the folder holds an index or a file of weights. Otherwise the names are empty
    and the bytes are None.
    """
    if not ((folder / INDEX).is_file() or (folder / SINGLE).is_file()):
        return set(), None
    shards = Shards.open(folder, key, complete=False)
    if (folder / INDEX).is_file():
        total_size = read_json(folder / INDEX).get("metadata", {}).get("total_size")
        return set(shards.file_of), total_size if isinstance(total_size, int) else None
    return set(shards.file_of), shards.num_bytes


def find_method_of_config(draft: ModelConfigInfo, target: ModelConfigInfo) -> str:
    """Return the method that a draft's config describes.

    Raises:
        UserError: if it describes no method that can be decoded here.
    """
    # Methods of other projects that nothing here can decode have a message of their own.
    foreign_method = find_foreign_method(draft.raw)
    if foreign_method:
        raise UserError(
            "draft",
            got=f"{draft.name}, a draft of method {foreign_method}, which is not decoded here yet",
            expected=DRAFT,
        )

    # Otherwise each method says whether the config is one of its own.
    method_name = next(
        (name for name, row in METHODS.items() if row.load().advice.is_described(draft, target)),
        None,
    )
    if method_name:
        return method_name
    raise UserError("draft", got=f"{draft.name}, a {draft.kind}", expected=DRAFT)


def check_draft_fit(draft: ModelConfigInfo, target: ModelConfigInfo, method: str) -> list[str]:
    """Check by their configs that a draft fits a target.

    Only a draft model may have a vocabulary that is padded differently, and any width. Other drafts
    share the target's embedding.

    Args:
        draft: the draft.
        target: the target.
        method: the draft's method.

    Returns:
        Warnings: one if padding may explain a difference of the vocabularies.

    Raises:
        UserError: for another vocabulary, for a draft of another width or for another depth, and
            for a draft that reads layers that the target lacks.
    """
    # The vocabularies: equal, or padded differently for a draft with an embedding of its own.
    standalone = METHODS[method].standalone
    depth = target.text.num_hidden_layers
    got = draft.text.vocab_size
    expected = target.text.vocab_size
    if got != expected and not (standalone and abs(got - expected) <= 0.01 * expected):
        raise UserError(
            "draft",
            got=f"{draft.name} with a vocabulary of {got:,}",
            expected=f"{expected:,}, the target's",
        )
    if got != expected:
        return [
            f"{draft.name} has a vocabulary of {got:,}, and the target one of {expected:,}:"
            " assuming the same tokenizer, padded differently"
        ]
    if standalone:
        return []

    # A head reads hidden states of the target: their width and depth have to be the target's.
    width = draft.raw.get("target_hidden_size") or draft.text.hidden_size
    if width != target.text.hidden_size:
        raise UserError(
            "draft",
            got=f"{draft.name} for a hidden size of {width:,}",
            expected=f"{target.text.hidden_size:,}, the target's",
        )
    made_for = draft.raw.get("num_target_layers") or depth
    if made_for != depth:
        raise UserError(
            "draft",
            got=f"{draft.name} for a target of {made_for} layers",
            expected=f"{depth}, the target's",
        )
    layers = getattr(METHODS[method].load().read_head_shape(draft.raw, depth), "aux_layers", ())
    beyond = [layer for layer in layers if not 0 <= layer <= depth]
    if beyond:
        raise UserError(
            "draft",
            got=f"{draft.name}, which reads the target after layers {', '.join(map(str, beyond))}",
            expected=f"layers 0 to {depth}, which the target has",
        )
    return []


@dataclass(frozen=True)
class KnownDraft:
    """A draft for a target that was found on the Hub.

    Attributes:
        repository: its Hub id.
        method: its method, inferred from its name and tags.
        found_by: `card` if the repository names the target as its base model, `name` if only their
            names are alike.
        downloads: how often it was downloaded.
    """

    repository: str
    method: str
    found_by: str
    downloads: int


def find_published_drafts(name: str, hub_id: str | None) -> tuple[list[KnownDraft], str | None]:
    """Search the Hub for drafts of a target.

    Cards are searched for the target's Hub id. Names are compared here, because the Hub searches
    for a single word: every word and number of the target's name must be in the draft's name.

    Args:
        name: the target's name.
        hub_id: its Hub id; None for a folder.

    Returns:
        The drafts, the most downloaded first, and the reason why the Hub was not asked; None if it
        was.
    """
    # pico is not on the Hub.
    if name == "pico":
        return [], "not asked: pico ships with this package"
    drafts: dict[str, KnownDraft] = {}
    try:
        # The first request has a time limit. The listing has none, and would try an unreachable Hub
        # for half a minute.
        get_session().get(
            f"{constants.ENDPOINT}/api/models", params={"limit": 1}, timeout=TIMEOUT_SECONDS
        ).raise_for_status()

        # Search by the target's id in the cards, then by its name in the names of repositories.
        for search in SEARCH_WORDS:
            for base in [f"base_model:{hub_id}", None] if hub_id else [None]:
                models = HfApi().list_models(
                    filter=base,
                    search=search,
                    sort="downloads",
                    limit=500,
                    expand=["downloads", "tags"],
                )
                for model in models:
                    method = infer_method(model.id, model.tags or [])
                    if method and model.id != hub_id and (base or has_target_name(model.id, name)):
                        drafts.setdefault(
                            model.id,
                            KnownDraft(
                                model.id, method, "card" if base else "name", model.downloads or 0
                            ),
                        )
    except (HfHubHTTPError, OfflineModeIsEnabled, HTTP_ERROR, ValueError) as error:
        reason = (
            find_connection_failure(error)
            or f"did not answer ({str(error).splitlines()[0] or type(error).__name__})"
        )
        return [], f"not asked: {constants.ENDPOINT} {reason}"
    return sorted(drafts.values(), key=lambda draft: -draft.downloads), None


def infer_method(repository: str, tags: list[str]) -> str | None:
    """Return the method that a repository's name and tags suggest.

    The most special word counts.

    Returns:
        The method; None if nothing suggests a draft.
    """
    # The patterns are in the order of METHOD_PATTERNS, in which special names come before general
    # ones.
    text = " ".join([repository, *tags]).lower()
    return next(
        (method for method, pattern in METHOD_PATTERNS.items() if re.search(pattern, text)), None
    )


def has_target_name(repository: str, target: str) -> bool:
    """Return whether every word and number of the target's name is in the draft's name.

    For example, `EAGLE3-LLaMA3.1-Instruct-8B` names `Llama-3.1-8B-Instruct`.
    """
    # Compare words and sizes, such as `llama`, `3.1` and `8b`. The version of EAGLE is no version
    # of the target.
    words, target_words = (
        set(
            re.findall(
                r"\d+(?:\.\d+)?[bm]?|[a-z]+",
                re.sub(r"eagle[-_ ]?3(\.1)?", " ", name.split("/")[-1].lower()),
            )
        )
        for name in (repository, target)
    )
    return bool(target_words) and target_words <= words
