"""The tables of pages say what the files hold."""

import re
from collections import defaultdict

from specdistill.common.project import GATES, ROOT
from specdistill.evaluation.gate.rules import Rule, load_gate
from specdistill.evaluation.report.text import format_table

SIGNS = {"min": "≥", "max": "≤", "equals": "=", "max_regression": "loss ≤"}


def read_page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def format_threshold(rule: Rule) -> str:
    """Return a threshold: with * if the number itself is tested, in parentheses for a warning."""
    number = rule.threshold
    text = str(number).lower() if isinstance(number, bool) else f"{number:_}"
    text += "*" if rule.confidence == 0 else ""
    return f"({text})" if rule.severity == "warn" else text


def test_the_page_of_the_gate_has_the_rules_of_each_gate_that_ships() -> None:
    page = read_page("gate.md")
    (head,) = re.findall(r"^\| rule \| (.*) \|$", page, re.MULTILINE)
    gates = re.findall(r"`([\w-]+)`", head)
    assert sorted(gates) == sorted(path.stem for path in GATES.glob("*.yaml"))
    cells: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for gate in gates:
        for rule in load_gate(gate):
            scope = "".join(f" ({key} {value})" for key, value in rule.scope.items())
            label = f"`{rule.metric}`{scope} {SIGNS[rule.requirement]}"
            cells[label][gate].append(format_threshold(rule))
    rows = [[rule, *(", ".join(of[gate]) for gate in gates)] for rule, of in cells.items()]
    assert format_table(["rule", *(f"`{gate}`" for gate in gates)], rows) in page
