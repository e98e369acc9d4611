"""Read what is known before anything is trained.

That is the config.json of a target and of a draft, and which drafts others published on the Hub.
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
# For each method, a pattern of the names that drafts of this method have. Special names come first.
METHOD_PATTERNS = OTHER_METHODS | {
    "dflash": r"dflash",
    "dspark": r"dspark",
    "eagle3": r"eagle[-_ ]?3",
    "eagle": r"eagle",
    "mtp": r"(?<![a-z])mtp(?![a-z])",
    "pard": r"(?<![a-z])pard(?![a-z])",
    "draft_model": r"draft",
}

# The words, common in the names of drafts, that the Hub is searched for. Each word takes one
# request, or two for a target with a Hub id.
SEARCH_WORDS = ("eagle", "speculator", "draft", "dflash", "dspark", "mtp", "pard")


def read_model_config(
    name: str, *, key: str, revision: str | None = None, trust_remote_code: bool = False
) -> ModelConfigInfo:
    """Read the config of a model, without its weights.

    It is the config.json of `pico`, of a folder or of a Hub id, or the config in a GGUF file.

    Args:
        name: `pico`, a folder, a GGUF file or a Hub id.
        key: the recipe key to name in errors.
        revision: the branch, tag or commit of a Hub id; None for the default branch.
        trust_remote_code: whether the repository's own code may be run.

    Returns:
        The model's description: its config, and what can be computed from it.

    Raises:
        UserError: if there is no config, or it cannot be read.
        ResourceError: when the Hub fails.
    """
    path, file = split_gguf(resolve(name, key))
    expected = "pico (built in), a folder, a GGUF file or a Hub id"

    # A GGUF file holds its config itself. Only the file's header is read. In the Hub's cache, the
    # folder of a repository is named after the commit, so `folder.name` is the revision.
    if file:
        folder = fetch(path, key=key, expected=expected, revision=revision, patterns=[file])
        config = read_gguf_config(folder, file, key=key, name=name)
        hub_id, revision = (None, None) if Path(path).is_dir() else (name, folder.name)
        return ModelConfigInfo(
            name,
            key,
            hub_id,
            revision,
            raw=config.to_dict(),
            config=config,
            native_mtp=None,
            stored_bytes=(folder / file).stat().st_size,
        )

    # Otherwise fetch config.json, and the index of the weights if there is one. The index shows
    # which tensors there are, and how large they are in total.
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
        # Drafts in a format of this project have a model_type that begins like this.
        if str(raw.get("model_type")).startswith("specdistill_"):
            config = PreTrainedConfig.from_dict(raw.get("text_config") or raw)
        elif isinstance(nested, dict):
            config = AutoConfig.for_model(**nested)
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if not isinstance(config.get_text_config(), PreTrainedConfig):
            raise TypeError("text_config without a config")

    # Quantized weights are smaller than their shapes say, so read the size of the stored tensors.
    hub_id = None if Path(path).is_dir() else path
    names, stored_bytes = _read_tensor_sizes(folder, key)

    # Ask each method whether the target's checkpoint has layers to draft with, such as those for
    # multi-token prediction.
    native_layers = (
        method.advice.find_native_layers(raw, names, config.get_text_config()) for method in methods
    )
    native_mtp = next(filter(None, native_layers), None)
    revision = folder.name if hub_id else None
    return ModelConfigInfo(
        name, key, hub_id, revision, raw, config, native_mtp, trust_remote_code, stored_bytes
    )


def _read_tensor_sizes(folder: Path, key: str) -> tuple[set[str], int | None]:
    """Return the names of a checkpoint's tensors, and their total size in bytes.

    The tensors are not read: names and sizes come from the index, or from the header of the single
    file of weights. If the folder holds neither, there are no names, and the size is None.
    """
    if not ((folder / INDEX).is_file() or (folder / SINGLE).is_file()):
        return set(), None
    # The files that an index names need not be in the folder (complete=False).
    shards = Shards.open(folder, key, complete=False)
    if (folder / INDEX).is_file():
        total_size = read_json(folder / INDEX).get("metadata", {}).get("total_size")
        return set(shards.file_of), total_size if isinstance(total_size, int) else None
    return set(shards.file_of), shards.num_bytes


def find_method_of_config(draft: ModelConfigInfo, target: ModelConfigInfo) -> str:
    """Return the name of the method that a draft is for, by its config.json.

    Raises:
        UserError: if the config is not that of a draft that specdistill can decode with.
    """
    # Drafts of some other projects are recognized, although specdistill cannot decode with them.
    foreign_method = find_foreign_method(draft.raw)
    if foreign_method:
        raise UserError(
            "draft",
            got=f"{draft.name}, a draft of method {foreign_method}, which specdistill does not"
            " support yet",
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
    """Check that a draft fits a target: vocabulary, hidden size and layers, by their configs.

    A draft model has an embedding of its own. So it may have any hidden size, and a vocabulary that
    is padded differently. All other drafts share the target's embedding.

    Args:
        draft: the draft.
        target: the target.
        method: the draft's method.

    Returns:
        A warning if the vocabularies differ so little that padding may be the reason; else an empty
        list.

    Raises:
        UserError: if the vocabulary or the hidden size differs from the target's, or if the draft
            is for a target with another number of layers.
    """
    # Compare the vocabularies. For a draft with an embedding of its own, a difference of up to 1 %
    # may be padding.
    standalone = METHODS[method].standalone
    draft_vocab = draft.text.vocab_size
    target_vocab = target.text.vocab_size
    may_be_padding = standalone and abs(draft_vocab - target_vocab) <= 0.01 * target_vocab
    if draft_vocab != target_vocab and not may_be_padding:
        raise UserError(
            "draft",
            got=f"{draft.name} with a vocabulary of {draft_vocab:,}",
            expected=f"the target's vocabulary of {target_vocab:,}",
        )
    if draft_vocab != target_vocab:
        return [
            f"{draft.name} has a vocabulary of {draft_vocab:,}, and the target has one of"
            f" {target_vocab:,}: assuming the same tokenizer with different padding"
        ]
    if standalone:
        return []

    # All other drafts read hidden states of the target, so they must be made for a target with this
    # hidden size and this number of layers.
    width = draft.raw.get("target_hidden_size") or draft.text.hidden_size
    if width != target.text.hidden_size:
        raise UserError(
            "draft",
            got=f"{draft.name} for a hidden size of {width:,}",
            expected=f"the target's hidden size of {target.text.hidden_size:,}",
        )
    depth = target.text.num_hidden_layers
    expected_depth = draft.raw.get("num_target_layers") or depth
    if expected_depth != depth:
        raise UserError(
            "draft",
            got=f"{draft.name} for a target of {expected_depth} layers",
            expected=f"a draft for the target's {depth} layers",
        )
    layers = getattr(METHODS[method].load().read_head_shape(draft.raw, depth), "aux_layers", ())
    beyond = [layer for layer in layers if not 0 <= layer <= depth]
    if beyond:
        raise UserError(
            "draft",
            got=f"{draft.name}, which reads the target after layers {', '.join(map(str, beyond))}",
            expected=f"layers from 0 to {depth}, the number of the target's layers",
        )
    return []


@dataclass(frozen=True)
class KnownDraft:
    """A draft that was found on the Hub for a target.

    Attributes:
        repository: its Hub id.
        method: its method, inferred from its name and tags.
        found_by: `card` if the draft's model card names the target as base model, `name` if only
            the repository's name is like the target's.
        downloads: how often it was downloaded.
    """

    repository: str
    method: str
    found_by: str
    downloads: int


def find_published_drafts(name: str, hub_id: str | None) -> tuple[list[KnownDraft], str | None]:
    """Search the Hugging Face Hub for published drafts for a target.

    A draft is found if its model card names the target as its base model, or if its name has every
    word and number of the target's name.

    Args:
        name: the target's name.
        hub_id: the target's Hub id; None for a folder.

    Returns:
        The drafts, the most downloaded first; and the reason why the Hub was not searched, which is
        None if it was.
    """
    # pico is not on the Hub.
    if name == "pico":
        return [], "not asked: pico ships with this package"
    drafts: dict[str, KnownDraft] = {}
    try:
        # Send a small request with a time limit first. `list_models` has no time limit, and would
        # try to reach the Hub for half a minute.
        get_session().get(
            f"{constants.ENDPOINT}/api/models", params={"limit": 1}, timeout=TIMEOUT_SECONDS
        ).raise_for_status()

        # For each word that is common in names of drafts, such as `eagle`, search twice. First list
        # the repositories whose card names the target as base model. Then list all repositories,
        # and take those with the target's name. `setdefault` keeps the first entry of a draft that
        # is found in both ways.
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
    """Guess the method of a draft from the name and the tags of its repository.

    Returns:
        The method; None if nothing suggests that the repository is a draft.
    """
    # METHOD_PATTERNS has special names before general ones, for example `eagle3` before `eagle`. So
    # the first match counts.
    text = " ".join([repository, *tags]).lower()
    return next(
        (method for method, pattern in METHOD_PATTERNS.items() if re.search(pattern, text)), None
    )


def has_target_name(repository: str, target: str) -> bool:
    """Return whether a repository's name has every word and number of the target's name.

    For example, `EAGLE3-LLaMA3.1-Instruct-8B` has all words of `Llama-3.1-8B-Instruct`.
    """
    target_words = _split_name(target)
    return bool(target_words) and target_words <= _split_name(repository)


def _split_name(name: str) -> set[str]:
    """Return the words and numbers in a model's name, such as `llama`, `3.1` and `8b`."""
    # `eagle3` is removed first, because its 3 would look like a version of the target.
    name = re.sub(r"eagle[-_ ]?3(\.1)?", " ", name.split("/")[-1].lower())
    return set(re.findall(r"\d+(?:\.\d+)?[bm]?|[a-z]+", name))
