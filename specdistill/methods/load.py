"""Find a draft by its name, recognize its method, and create or load it.

The method is recognized by the content of the folder: first by the names of the tensors, then by
what config.json calls itself. Tensors come first because configs are unreliable: SafeAILab's
EAGLE-3 heads call themselves `LlamaForCausalLM`, as a plain model does.
"""

import re
from collections.abc import Sequence, Set
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn

from specdistill.common.documents import read_json
from specdistill.common.errors import UserError, convert_errors
from specdistill.common.repositories import fetch, resolve, split_gguf, split_revision
from specdistill.decoding.lookup_first import LookupFirstProposer
from specdistill.decoding.proposer import Proposer
from specdistill.decoding.transformers_models import check_reads_trees
from specdistill.methods import METHODS, get_method
from specdistill.methods.base import Method
from specdistill.methods.checkpoint import PICKLE_FILE, load_pickle, read_config
from specdistill.methods.compatibility import check_draft
from specdistill.methods.first_loss import check_first_loss
from specdistill.methods.recipe import TrainedRecipe
from specdistill.methods.sizes import RawConfig
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.targets.files import INDEX, SINGLE, Shards, TargetFiles, hash_contents
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.history import read_history

# Values of `draft.init` for drafts that are made from the target alone.
FRESH_INITIALIZATIONS = (None, "layers", "scratch")
EXPECTED = "a draft: config.json and weights of a head, a block drafter or a causal language model"
# Methods that are not decoded here, and the pattern by which the config.json of their drafts is
# recognized.
OTHER_METHODS = {"peagle": r"p-?eagle", "dflash2": r"dflash2"}
# Name patterns of the files that belong to a draft. Only these are fetched from the Hub and hashed,
# so that a README or a log in the folder does not change the draft's hash.
WEIGHTS = ("*.safetensors", "*.index.json", "pytorch_model*.bin")
TOKENIZER = (
    "tokenizer*",
    "*tokens*.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "chat_template.json",
    "spiece.model",
    "*.tiktoken",
)
DRAFT_FILES = ("config.json", "generation_config.json", *WEIGHTS, *TOKENIZER)


def create_draft(recipe: TrainedRecipe, target: FrozenTarget, rows: Dataset) -> nn.Module:
    """Create the draft that a recipe describes, as it is before its first training step.

    The draft has new weights, or those of the trained draft in `draft.init`. The loss of a draft
    with new weights can be very high at first. Then `check_first_loss` scales its output down.

    Args:
        recipe: the recipe.
        target: the target.
        rows: training data, by which methods choose a draft vocabulary.

    Returns:
        The draft in float32, whatever the dtype of a file.

    Raises:
        UserError: for settings that do not fit each other or the target.
    """
    method = load_method(recipe.method)
    draft = method.create(recipe, target, rows).float()
    # `check_first_loss` replaces the divergence of the objective that it gets. So this objective is
    # not used again: training builds its own.
    throwaway_objective = method.build_objective(draft, recipe, target)
    check_first_loss(throwaway_objective, target, rows, is_fresh=recipe.is_fresh)
    return draft


def check_initialization(recipe: TrainedRecipe, target: TargetFiles | None) -> None:
    """Check the trained draft or model in `draft.init`, if the recipe names one.

    It must be a draft of the recipe's own method. Methods whose drafts are whole language models
    also accept each other's. The draft may have been trained for another target, such as the model
    of which the recipe's target is a fine-tune.

    Args:
        recipe: the recipe.
        target: the target's files; None: check nothing.

    Raises:
        UserError: for a draft of another method, or one that does not fit the target.
    """
    # Only a folder, a Hub id (with a slash) or the shipped model `pico` is checked. Words such as
    # `layers` name no trained draft, and a GGUF file cannot be checked like a folder.
    init = str(getattr(recipe.draft, "init", None))
    names_draft = Path(init).is_dir() or "/" in init or init == "pico"
    if target is None or not names_draft or split_gguf(init)[1]:
        return

    # Check the method of the draft, then the draft itself.
    folder = locate(init, key="draft.init")
    method_name = find_method(folder, key="draft.init")
    if method_name != recipe.method and not (
        METHODS[method_name].standalone and METHODS[recipe.method].standalone
    ):
        raise UserError(
            "draft.init",
            got=f"{init}, which holds a draft of method {method_name}",
            expected=f"a draft of method {recipe.method}",
        )
    check_draft(method_name, folder, target, "draft.init", reads_record=False)


def load_proposer(
    method: str,
    draft: Path | str | None,
    target: FrozenTarget,
    *,
    key: str = "eval.draft",
    lookup_first: LookupFirstConfig | None = None,
    compile: bool = False,
    made_for: TargetFiles | None = None,
    logs: bool = True,
    **options: Any,
) -> Proposer:
    """Load a draft, and return the object that proposes tokens with it during decoding.

    Args:
        method: the name of the method.
        draft: a folder or Hub id, in any layout that can be read; None for a method that is not
            trained.
        target: the target that verifies.
        key: the recipe key that the draft came from, which errors name.
        lookup_first: a lookup that proposes first; the draft then only runs if the lookup finds
            nothing. None: no lookup.
        compile: whether to compile the proposer's passes, if it can.
        made_for: files of the target to check the draft against; None: the files of `target`.
        logs: whether to log the warnings of that check.
        **options: the method's own options, as `Recipe.list_proposer_options` returns them.

    Raises:
        UserError: if the method is unknown, or if the draft is for another target or does not fit.
        ResourceError: if the Hub fails.
    """
    # Find the draft, and check it against the target before its weights are loaded. A target that
    # was made in memory has no files to check against.
    folder = locate_trained(method, draft, key=key)
    files = made_for or target.files
    if folder is not None and files is not None:
        check_draft(method, folder, files, key, logs=logs, **options)

    # Load the draft. Only some proposers can compile their passes.
    proposer = load_method(method).load_proposer(folder, target, key=key, **options)
    if hasattr(proposer, "compiled"):
        proposer.compiled = compile

    # Put the lookup in front. Where it finds nothing, the draft may draft trees, which the target
    # must be able to read.
    if lookup_first:
        if lookup_first.draft_tree:
            check_reads_trees(target)
        lookup = load_method(lookup_first.method).build_lookup(lookup_first.min, lookup_first.max)
        proposer = LookupFirstProposer(proposer, lookup, lookup_first)
    return proposer


def locate_trained(method: str, draft: Path | str | None, *, key: str) -> Path | None:
    """Return the folder of a draft, after checking that the draft is of this method.

    Args:
        method: the name of the method.
        draft: a folder or Hub id.
        key: the recipe key to name in errors.

    Returns:
        The folder, which for a Hub id is in the local cache; None for a method without weights.

    Raises:
        UserError: if the method is unknown, or if the folder holds no draft of this method.
        ResourceError: if the Hub fails.
    """
    if not get_method(method).is_trained:
        return None
    folder = locate(str(draft), key=key)
    method_name = find_method(folder, key=key)
    if method_name != method:
        raise UserError(
            key,
            got=f"{draft}, which holds a draft of method {method_name}",
            expected=f"a draft of method {method}",
        )
    return folder


def load_method(name: str) -> Method[TrainedRecipe, nn.Module]:
    """Import the package of a method and return its `Method` object.

    Raises:
        UserError: for an unknown name.
    """
    return get_method(name).load()


def locate(
    draft: str,
    *,
    key: str = "eval.draft",
    expected: str = "the folder or Hub id of a draft",
    names: Sequence[str] = (),
    patterns: Sequence[str] = DRAFT_FILES,
) -> Path:
    """Return the local folder of a draft; for a Hub id, download the files into the Hub's cache.

    Args:
        draft: a folder or Hub id. `org/name@revision` is a branch, tag or commit.
        key: the recipe key to name in errors.
        expected: what the error says was expected.
        names: words that are also valid values of the key; the error suggests the nearest.
        patterns: name patterns of the files to download.

    Raises:
        UserError: for a path that is not a folder.
        ResourceError: if the Hub fails.
    """
    name, revision = split_revision(draft)
    return fetch(
        resolve(name, key, expected=expected, names=names),
        key=key,
        expected=expected,
        revision=revision,
        patterns=patterns,
    )


def draft_files(folder: Path) -> list[Path]:
    """Return the sorted files of a folder that belong to the draft, by the names in DRAFT_FILES."""
    return sorted(path for path in folder.iterdir() if path.is_file() and _is_draft_file(path))


def _is_draft_file(path: Path) -> bool:
    """Return whether the name of a file matches one of the patterns in DRAFT_FILES."""
    return any(fnmatch(path.name, pattern) for pattern in DRAFT_FILES)


def draft_hash(folder: Path) -> str:
    """Return the sha256 of the names and contents of a draft's files.

    The hash does not depend on where the folder is or on what else the folder holds.
    """
    return hash_contents(draft_files(folder))


def describe_draft(draft: str | None, method: str) -> dict[str, object]:
    """Return the `draft` section of a report, from the draft's name and its files.

    The section holds the folder or Hub id, the commit if it is a Hub id, the hash of the files, and
    what the history of the run says about training.

    Args:
        draft: a folder or Hub id; None for a method without weights.
        method: the name of the method.

    Raises:
        UserError: for a path that is not a folder.
        ResourceError: if the Hub fails.
    """
    if draft is None:
        return {"model": None, "revision": None, "method": method}

    # Identify the draft. For a Hub id the folder is in the Hub's cache, where it is named after the
    # commit.
    folder = locate(draft)
    is_local = Path(resolve(split_revision(draft)[0])).is_dir()
    identity: dict[str, object] = {
        "model": draft,
        "revision": None if is_local else folder.name,
        "method": method,
        "weights": draft_hash(folder),
    }

    # Add what the history of the run says, if the draft was trained by specdistill.
    history = read_history(folder, key="eval.draft")
    if history is None:
        return identity
    training = {
        "training": history.compare_before_and_after(),
        "acceptance_curve": history.list_acceptance_curve(),
    }
    return identity | {name: part for name, part in training.items() if part}


def find_method(folder: Path, *, key: str = "eval.draft") -> str:
    """Return the name of the method that made the draft in a folder.

    Args:
        folder: the folder.
        key: the recipe key to name in errors.

    Raises:
        UserError: for a folder without a draft of a known method. The error says what was found.
    """
    return recognize_method(
        read_config(folder, key), _read_tensor_names(folder, key), name=folder, key=key
    )


def recognize_method(config: RawConfig, names: Set[str], *, name: Path | str, key: str) -> str:
    """Return the method whose drafts have this config.json and tensors of these names.

    Args:
        config: the content of config.json.
        names: the names of the tensors.
        name: what errors call the draft.
        key: the recipe key to name in errors.

    Raises:
        UserError: if no method recognizes them. The error says what was found.
    """
    # Ask every method about the tensors first, because configs are less reliable (see the module).
    # A folder without tensors holds no draft, so no method is asked.
    methods = {method_name: row.load() for method_name, row in METHODS.items()} if names else {}
    for method_name, method in methods.items():
        if method.has_tensors(names):
            return method_name
    for method_name, method in methods.items():
        if method.is_named(config, names):
            return method_name

    # No method recognizes the draft. The error names the method of another project, or says what
    # the files hold.
    foreign_method = find_foreign_method(config)
    if names and foreign_method:
        raise UserError(
            key,
            got=f"{name}, a draft of method {foreign_method}, which is not supported yet",
            expected=EXPECTED,
        )
    architectures = config.get("architectures") or []
    weights = f"{len(names)} tensors" if names else "no weights"
    what = f"architectures {', '.join(map(str, architectures)) or 'not named'} and {weights}"
    raise UserError(key, got=f"{name}, which holds a config.json with {what}", expected=EXPECTED)


def find_foreign_method(config: RawConfig) -> str | None:
    """Return the method of another project that a draft's config.json names; None if it names none.

    specdistill knows the names of these methods (OTHER_METHODS), but cannot decode with their
    drafts.
    """
    stated_names = [*(config.get("architectures") or []), config.get("speculators_model_type")]
    for method, pattern in OTHER_METHODS.items():
        if re.search(pattern, " ".join(map(str, stated_names)).lower()):
            return method
    return None


def _read_tensor_names(folder: Path, key: str) -> set[str]:
    """Return the names of the tensors in a folder's weights, without reading the tensors.

    The result is empty if the folder has no weights.
    """
    # Safetensors list their names in the index or the header. A pickle is loaded without content.
    if (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        return set(Shards.open(folder, key).file_of)
    if (folder / PICKLE_FILE).is_file():
        return set(load_pickle(folder / PICKLE_FILE, key, device="meta"))
    # Shards that are pickles have an index of another name.
    indexes = sorted(folder.glob("*.index.json"))
    if not indexes:
        return set()
    with convert_errors(
        (ValueError, KeyError, TypeError, OSError), key, indexes[0], "an index with a weight_map"
    ):
        return set(read_json(indexes[0])["weight_map"])
