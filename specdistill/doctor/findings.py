"""What the doctor found, in words that a person can act on."""

from dataclasses import dataclass
from enum import StrEnum

from specdistill.errors import UserError


class Severity(StrEnum):
    """A problem makes a draft useless or worse than it is; a warning may; a note says what to know."""

    PROBLEM = "problem"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """what: the fact. do: what to do about it, where that is known."""

    severity: Severity
    what: str
    do: str = ""


def problem(what: str, do: str = "") -> Finding:
    return Finding(Severity.PROBLEM, what, do)


def warning(what: str, do: str = "") -> Finding:
    return Finding(Severity.WARNING, what, do)


def note(what: str, do: str = "") -> Finding:
    return Finding(Severity.NOTE, what, do)


def refusal(error: UserError) -> Finding:
    """What a reader refused, without the key that an argument has on the command line."""
    return problem(str(error).removeprefix(f"{error.key}: got "))
