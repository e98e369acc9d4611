"""A draft by its name: where it is, which method it is for, and made for training or loaded for decoding.

The method is told by the folder's content, the tensors' names first, then what its config.json calls itself. Tensors decide because configs
do not: SafeAILab's EAGLE-3 heads call themselves `LlamaForCausalLM`, as a plain model does.
"""

import itertools
import re
from collections.abc import Mapping, Sequence, Set
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from datasets import Dataset

from specdistill.decoding.lookup_first import LookupFirstProposer
from specdistill.decoding.online_length import OnlineLengthProposer
from specdistill.decoding.proposer import Proposer
from specdistill.decoding.transformers_models import check_reads_trees
from specdistill.errors import UserError, refusing
from specdistill.files.documents import read_json
from specdistill.methods import METHODS, method_named
from specdistill.methods.checkpoint import PICKLED, read_config, unpickled
from specdistill.methods.contract import Draft, Implementation
from specdistill.methods.target_record import check_target
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.repositories import fetch, resolve, split_revision
from specdistill.targets.files import INDEX, SINGLE, Shards, TargetFiles, content_hash
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.history import read_history

EXPECTED = "a draft: an EAGLE or MTP head or a causal language model, config.json and weights"
# Methods that are not decoded here, by what their drafts' config.json says that they are.
OTHER_METHODS = {"peagle": r"p-?eagle", "dflash2": r"dflash2"}
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
WHOLE_DRAFT = ("config.json", "generation_config.json", *WEIGHTS, *TOKENIZER)


def create_draft(recipe: Any, target: FrozenTarget, rows: Dataset) -> Draft:
    """The draft that a recipe describes, before its first step: fresh, or continued from `draft.init`; in float32, whatever a file holds.

    rows: training data, by which methods choose a draft vocabulary. Raises UserError for settings that do
    not fit each other or the target.
    """
    return implementation(recipe.method).create(recipe, target, rows).float()


def load_proposer(
    method: str,
    draft: Path | str | None,
    target: FrozenTarget,
    *,
    key: str = "eval.draft",
    lookup_first: LookupFirstConfig | None = None,
    draft_length: str = "fixed",
    compile: bool = False,
    made_for: TargetFiles | None = None,
    **options: Any,
) -> Proposer:
    """The proposer of a method, behind a lookup if there is to be one; `options` are the method's own, as `Recipe.proposer_options`
    gives them. draft_length: `online` has the proposer choose the length of each chain, up to K. compile: its passes, where it can.
    made_for: what the draft's record must name, if not the target.

    The draft is a folder or a Hub id, in any layout that is read, None for a method that is not trained; `key` is the key that it
    came from, which errors name.
    Raises UserError when the method is unknown, or the draft is another target's or does not fit; ResourceError when the Hub fails.
    """
    folder = None
    if method_named(method).is_trained:
        folder = locate(str(draft), key=key)
        if (found := method_of(folder, key=key)) != method:
            raise UserError(
                key,
                got=f"{draft}, which holds a draft of method {found}",
                expected=f"one of method {method}",
            )
        if (files := made_for or target.files) is not None:
            check_target(folder, files, key, **options)
    proposer = implementation(method).load_proposer(folder, target, key=key, **options)
    if hasattr(proposer, "compiled"):
        proposer.compiled = compile
    if draft_length == "online":
        proposer = OnlineLengthProposer(proposer)
    if lookup_first:
        if lookup_first.draft_tree:
            check_reads_trees(target)
        lookup = implementation(lookup_first.method).lookup(lookup_first.min, lookup_first.max)
        proposer = LookupFirstProposer(proposer, lookup, lookup_first)
    return proposer


def implementation(method: str) -> Implementation:
    """A method's functions. Raises as `method_named`."""
    return method_named(method).implementation()


def locate(
    draft: str,
    *,
    key: str = "eval.draft",
    expected: str = "the folder or Hub id of a draft",
    patterns: Sequence[str] = WHOLE_DRAFT,
) -> Path:
    """The folder of a draft: itself, or the Hub's files in the local cache; `org/name@revision` is a branch, tag or commit of it.

    patterns: which of the Hub's files are fetched.

    Raises UserError for a path that is no folder, ResourceError when the Hub fails.
    """
    name, revision = split_revision(draft)
    return fetch(
        resolve(name, key), key=key, expected=expected, revision=revision, patterns=patterns
    )


def draft_files(folder: Path) -> list[Path]:
    """The files of a folder that are the draft: those of the names in WHOLE_DRAFT, in order."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and any(fnmatch(path.name, name) for name in WHOLE_DRAFT)
    )


def draft_hash(folder: Path) -> str:
    """sha256 of a draft: of the names and contents of its files, wherever they lie, and whatever else lies next to them."""
    return content_hash(draft_files(folder))


def describe_draft(draft: str | None, method: str) -> dict[str, Any]:
    """A report's `draft`, as far as its name and files say: the folder or Hub id, the commit of the latter, the hash of its files, and what
    its run's history says of its training.

    draft: None for a method without weights. Raises as `locate`.
    """
    if draft is None:
        return {"model": None, "revision": None, "method": method}
    folder = locate(draft)
    is_here = Path(resolve(split_revision(draft)[0])).is_dir()
    described = {
        "model": draft,
        "revision": None if is_here else folder.name,
        "method": method,
        "weights": draft_hash(folder),
    }
    history = read_history(folder, key="eval.draft")
    found = (
        {"training": history.before_and_after(), "acceptance_curve": history.acceptance_curve()}
        if history
        else {}
    )
    return described | {name: part for name, part in found.items() if part}


def method_of(folder: Path, *, key: str = "eval.draft") -> str:
    """The method whose draft a folder holds. `key` is what errors name; raises UserError, saying what was found, for anything else."""
    return recognized(read_config(folder, key), _tensor_names(folder, key), name=folder, key=key)


def recognized(config: Mapping[str, Any], names: Set[str], *, name: Path | str, key: str) -> str:
    """The method whose draft has this config.json and tensors of these names. Raises UserError, calling it `name`, for anything else."""
    methods = {each: method.implementation() for each, method in METHODS.items()} if names else {}
    certain = (each for each, method in methods.items() if method.has_tensors(names))
    named = (each for each, method in methods.items() if method.is_named(config, names))
    if found := next(itertools.chain(certain, named), None):
        return found
    if names and (other := other_method(config)):
        raise UserError(
            key,
            got=f"{name}, a draft of method {other}, which is not decoded here yet",
            expected=EXPECTED,
        )
    architectures = config.get("architectures") or []
    weights = f"{len(names)} tensors" if names else "no weights"
    what = f"architectures {', '.join(map(str, architectures)) or 'not named'} and {weights}"
    raise UserError(key, got=f"{name}, which holds a config.json with {what}", expected=EXPECTED)


def other_method(config: Mapping[str, Any]) -> str | None:
    """The method of another project that a draft's config.json speaks of; None where it speaks of none that is known."""
    stated = " ".join(
        map(str, [*(config.get("architectures") or []), config.get("speculators_model_type")])
    ).lower()
    return next(
        (method for method, pattern in OTHER_METHODS.items() if re.search(pattern, stated)), None
    )


def _tensor_names(folder: Path, key: str) -> set[str]:
    """Names of the tensors in a folder's weights, without reading the tensors; empty when it has no weights."""
    if (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        return set(Shards.open(folder, key).file_of)
    if (folder / PICKLED).is_file():
        return set(unpickled(folder / PICKLED, key, device="meta"))
    index = next(iter(sorted(folder.glob("*.index.json"))), None)  # of shards that are pickles
    with refusing(
        (ValueError, KeyError, TypeError, OSError), key, index, "an index with a weight_map"
    ):
        return set(read_json(index)["weight_map"]) if index else set()
