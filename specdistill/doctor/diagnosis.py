"""The whole examination: files first, and decoding for what is sound enough to be decoded with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdistill.doctor.acceptance import Acceptance, Recorded, check_acceptance, prompts_of, recorded
from specdistill.doctor.checkpoint import Examination, examine
from specdistill.doctor.findings import Finding, Severity, note, refusal
from specdistill.errors import UserError
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget


@dataclass(frozen=True)
class Diagnosis:
    """acceptance: None where nothing was decoded. recorded: what training saw; None where there is no history."""

    files: Examination
    target: str | None
    findings: list[Finding]
    acceptance: Acceptance | None
    recorded: Recorded | None

    @property
    def is_sound(self) -> bool:
        return all(finding.severity != Severity.PROBLEM for finding in self.findings)


def diagnose(
    draft: Path,
    engine: str | None = None,
    *,
    decode: bool = True,
    suite: str | None = None,
    num_prompts: int = 8,
    model: str | None = None,
    **target: Any,
) -> Diagnosis:
    """Examine the draft in a folder.

    Args:
        engine: one with `loaders`, which the draft is checked against.
        decode: with a target, decode `num_prompts` prompts of a suite (see `prompts_of`).
        model: its target, pico, a folder or a Hub id; `target`: the other arguments of `FrozenTarget.load`.

    Raises UserError for a target or a suite that is none, ResourceError when the Hub fails.
    """
    files = examine(draft, TargetFiles.of(model, target.get("revision")) if model else None, engine)
    findings, acceptance = list(files.findings), None
    if model and decode and files.is_whole and files.method is not None:
        loaded = FrozenTarget.load(model, **target)
        prompts = prompts_of(draft, suite, loaded, num_prompts)
        try:
            acceptance, more = check_acceptance(draft, files.method, loaded, prompts)
            findings += more
        except UserError as error:
            if error.key != "draft":
                raise
            findings.append(refusal(error))
    elif model and decode:
        findings.append(note("not decoded: what is broken comes first"))
    return Diagnosis(files, model, findings, acceptance, recorded(draft))
