"""How numbers are written, the same in every format: `–` for None, and intervals from a result row."""

from collections.abc import Mapping
from typing import Any


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def signed(change: float) -> str:
    """A relative change, with a minus as wide as the plus."""
    return f"{change:+.1%}".replace("-", "−")


def interval(row: Mapping[str, Any], name: str) -> str:
    """A metric's interval, as 1.43 to 1.65; empty where there is none."""
    low_high = row.get(f"{name}_ci95")
    return f"{low_high[0]:.2f} to {low_high[1]:.2f}" if low_high else ""


def between(row: Mapping[str, Any], name: str) -> str:
    """`interval` in brackets, to follow the number."""
    shown = interval(row, name)
    return f" ({shown})" if shown else ""


def counted(count: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def duration(seconds: float | None) -> str:
    """In the two largest units that are not zero, as 2 min 21 s."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def size(num_bytes: int) -> str:
    """Bytes in KiB, MiB or GiB."""
    if not num_bytes:
        return "none"
    units = (("GiB", 30), ("MiB", 20), ("KiB", 10))
    unit, power = next((pair for pair in units if num_bytes >= 2 ** pair[1]), units[-1])
    return f"{num_bytes / 2**power:,.1f} {unit}"
