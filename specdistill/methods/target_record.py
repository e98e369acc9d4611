"""The record of its target in a draft's config.json, `{"specdistill": {"target": …}}`: what else is given as its target is refused; and,
in a file of its own, the chat template that `data.chat_template` gave the target when the draft was trained.

The record stands there because it is uploaded, exported and copied with the weights; engines and transformers leave keys alone that they
do not know. Drafts without it, as other projects write them, are for whichever target they fit.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from specdistill.credentials import without_places
from specdistill.errors import UserError, refusing
from specdistill.methods.checkpoint import read_config
from specdistill.methods.contract import Draft, Implementation
from specdistill.targets.files import TargetFiles, TargetIdentity
from specdistill.targets.frozen import FrozenTarget

SECTION = "specdistill"
TEMPLATE = "target_chat_template.jinja"  # a draft model's folder has a tokenizer's, too


def save_draft(
    method: Implementation,
    target: FrozenTarget,
    draft: Draft,
    folder: Path,
    chat_template: str | None = None,
) -> None:
    """Write a draft in its method's public layout, with the record of its target; of one made in memory there is none. chat_template: of
    `data:`, which the target's tokenizer has then.
    """
    method.save(draft, target, folder)
    if chat_template is not None:
        (folder / TEMPLATE).write_text(target.tokenizer.chat_template, encoding="utf-8")
    _write(folder, target.identity if target.files else None)


def copy_record(draft: Path, output: Path) -> None:
    """Give an export the record, and the chat template, that the exported draft has."""
    _write(output, recorded_target(draft, "draft"))
    if (draft / TEMPLATE).is_file():
        shutil.copyfile(draft / TEMPLATE, output / TEMPLATE)


def use_recorded_template(drafts: Iterable[Path], tokenizer: Any, key: str) -> None:
    """Give a target's tokenizer the chat template that drafts were trained with. Raises UserError for drafts of several."""
    found = {
        (draft / TEMPLATE).read_text(encoding="utf-8")
        for draft in drafts
        if (draft / TEMPLATE).is_file()
    }
    if len(found) > 1:
        raise UserError(
            key,
            got=f"drafts with different files {TEMPLATE}",
            expected="drafts of one chat template",
        )
    for template in found:
        tokenizer.chat_template = template


def recorded_target(draft: Path, key: str) -> TargetIdentity | None:
    """What the draft in a folder was made for; None where that is not recorded. Raises UserError for an invalid record."""
    section = read_config(draft, key).get(SECTION)
    if section is None:
        return None
    what = f'{draft / "config.json"} with "{SECTION}" {json.dumps(section)[:120]}'
    with refusing(
        (TypeError, KeyError, ValueError),
        key,
        what,
        "the record of the draft's target, or no such key",
    ):
        return TypeAdapter(TargetIdentity).validate_python(
            vars(TargetIdentity(**section["target"]))
        )


def check_target(
    draft: Path, target: TargetFiles, key: str, *, heterogeneous_vocab: bool = False, **options: Any
) -> None:
    """Raises UserError when the draft in a folder was made for another target.

    options: of decoding. With `heterogeneous_vocab` a draft of another family is asked for, one for a target with another tokenizer.
    """
    made_for = recorded_target(draft, key)
    if made_for is None or (
        heterogeneous_vocab and made_for.tokenizer != target.identity.tokenizer
    ):
        return
    if not made_for.is_same(target.identity):
        way_out = f'to try it anyway, delete its "{SECTION}" record'
        raise UserError(
            key,
            got=f"{draft}, a draft for {made_for}",
            expected=f"a draft for {target.identity}; {way_out}",
        )


def _write(folder: Path, identity: TargetIdentity | None) -> None:
    """Replace the record in a folder's config.json: a draft may have been initialized from one that was made for another target."""
    path = folder / "config.json"
    config: dict[str, Any] = {
        name: value for name, value in read_config(folder, "draft").items() if name != SECTION
    }
    if identity is not None:
        config[SECTION] = {"target": without_places(dataclasses.asdict(identity))}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
