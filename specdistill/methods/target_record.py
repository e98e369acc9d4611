"""Read and write the record of a draft's target in config.json, and the target's chat template.

The record is `{"specdistill": {"target": …}}`. A draft is refused for any other target. If
`data.chat_template` gave the target a chat template when the draft was trained, that is kept in a
file of its own.

The record is in config.json because that file is uploaded, exported and copied with the weights.
Engines and transformers ignore keys that they do not know. Drafts without a record, as other
projects write them, are for any target that they fit.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerBase

from specdistill.common.credentials import remove_places
from specdistill.common.errors import UserError, convert_errors
from specdistill.methods.base import Method, RecipeT
from specdistill.methods.checkpoint import read_config
from specdistill.methods.layers import DraftT
from specdistill.targets.files import TargetFiles, TargetIdentity
from specdistill.targets.frozen import FrozenTarget

# The key in config.json. It has this project's name, so that no other program uses it.
SECTION = "specdistill"
# The name differs from that of a tokenizer's template, which the folder of a draft model also has.
TEMPLATE = "target_chat_template.jinja"


def save_draft(
    method: Method[RecipeT, DraftT],
    target: FrozenTarget,
    draft: DraftT,
    folder: Path,
    chat_template: str | None = None,
) -> None:
    """Write a draft to a folder, together with a record of the target that it was made for.

    The record names the target. A target that was made in memory has no name, so no record is
    written.

    Args:
        method: the draft's method, which knows the file format.
        target: the target.
        draft: the draft.
        folder: the folder to write to.
        chat_template: the recipe's `data.chat_template`. If it is set, the target's tokenizer has
            this template already, and the template is written next to the draft.
    """
    method.save(draft, target, folder)
    if chat_template is not None:
        (folder / TEMPLATE).write_text(target.tokenizer.chat_template, encoding="utf-8")
    _write_record(folder, target.identity if target.files else None)


def copy_record(draft: Path, output: Path) -> None:
    """Copy a draft's record of its target, and its chat template, into the folder of an export."""
    _write_record(output, read_target_record(draft, "draft"))
    if (draft / TEMPLATE).is_file():
        shutil.copyfile(draft / TEMPLATE, output / TEMPLATE)


def use_recorded_template(
    drafts: Iterable[Path], tokenizer: PreTrainedTokenizerBase, key: str
) -> None:
    """Give a target's tokenizer the chat template that the given drafts were trained with.

    Args:
        drafts: the folders of the drafts.
        tokenizer: the target's tokenizer, which is changed.
        key: the recipe key that the error names.

    Raises:
        UserError: if the drafts have different chat templates.
    """
    # Collect the templates. Drafts without a template file were trained with the target's own.
    templates = {
        (draft / TEMPLATE).read_text(encoding="utf-8")
        for draft in drafts
        if (draft / TEMPLATE).is_file()
    }
    if len(templates) > 1:
        raise UserError(
            key,
            got=f"drafts with different chat templates ({TEMPLATE})",
            expected="drafts that were trained with the same chat template",
        )

    # There is at most one template. Without one, the tokenizer keeps the target's own.
    for template in templates:
        tokenizer.chat_template = template


def read_target_record(draft: Path, key: str) -> TargetIdentity | None:
    """Return the target that the draft in a folder was made for.

    Args:
        draft: the folder of the draft.
        key: the recipe key to name in errors.

    Returns:
        The name and properties of the target; None if the draft's config.json has no record.

    Raises:
        UserError: for an invalid record.
    """
    section = read_config(draft, key).get(SECTION)
    if section is None:
        return None

    # Errors quote the beginning of the record, because it may be long if it is broken.
    description = f'{draft / "config.json"} with "{SECTION}" {json.dumps(section)[:120]}'
    with convert_errors(
        (TypeError, KeyError, ValueError),
        key,
        description,
        "the record of the draft's target, or none",
    ):
        # The constructor of `TargetIdentity` raises for unknown and missing keys. pydantic then
        # checks the types of the values.
        return TypeAdapter(TargetIdentity).validate_python(
            vars(TargetIdentity(**section["target"]))
        )


def check_target(
    draft: Path,
    target: TargetFiles,
    key: str,
    *,
    heterogeneous_vocab: bool = False,
    **options: object,
) -> None:
    """Raise UserError if the draft in a folder was made for another target.

    Args:
        draft: the folder of the draft.
        target: the target's files.
        key: the recipe key that the error names.
        heterogeneous_vocab: whether the user asked for a draft with another tokenizer. Then a draft
            for a target with another tokenizer is allowed.
        **options: other options of decoding, which are not read.
    """
    # A draft without a record is allowed for any target. A draft for a target with another
    # tokenizer is allowed if the user asked for it.
    recorded_target = read_target_record(draft, key)
    if recorded_target is None or (
        heterogeneous_vocab and recorded_target.tokenizer != target.identity.tokenizer
    ):
        return
    if not recorded_target.is_same(target.identity):
        raise UserError(
            key,
            got=f"{draft}, a draft for {recorded_target}",
            expected=(
                f"a draft for {target.identity}; to try this draft anyway, delete the key"
                f' "{SECTION}" from its config.json'
            ),
        )


def _write_record(folder: Path, identity: TargetIdentity | None) -> None:
    """Write the record of a draft's target into the config.json of a folder.

    Args:
        folder: the folder of the draft.
        identity: the target; None only removes an old record. There is an old record if the draft
            was initialized from a draft that had one.
    """
    # Remove the old record, and write the new one. `remove_places` removes paths of this machine.
    path = folder / "config.json"
    config: dict[str, object] = {
        name: value for name, value in read_config(folder, "draft").items() if name != SECTION
    }
    if identity is not None:
        config[SECTION] = {"target": remove_places(dataclasses.asdict(identity))}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
