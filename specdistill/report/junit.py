"""junit.xml: one test case for each gate rule, so that any CI shows which one failed. An alarm, which does not decide, is a skipped
case with a message: visible, and no failure.
"""

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from specdistill.report.wording import measured, outcome, requirement, scope, title


def to_junit(report: Mapping[str, Any]) -> str:
    rules = report["gate"]["rules"]
    outcomes = [outcome(rule) for rule in rules]
    counts = {
        "tests": len(rules),
        "failures": outcomes.count("failed"),
        "errors": 0,
        "skipped": outcomes.count("alarm"),
    }
    suite = ElementTree.Element(
        "testsuite",
        {name: str(count) for name, count in counts.items()},
        name=_printable(title(report)),
        timestamp=report["created"],
    )
    for rule in rules:
        name = f"{rule['metric']} {requirement(rule)} [{scope(rule)}]"
        case = ElementTree.SubElement(suite, "testcase", classname="gate", name=_printable(name))
        text = _printable(f"{measured(rule)}: {rule['reason']}")
        if outcome(rule) == "failed":
            ElementTree.SubElement(case, "failure", message=text)
        elif outcome(rule) == "alarm":
            ElementTree.SubElement(case, "skipped", message=f"alarm: {text}")
        else:
            ElementTree.SubElement(case, "system-out").text = text
    ElementTree.indent(suite)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(suite, encoding="unicode")}\n'


def _printable(text: str) -> str:
    """XML has no way to write most control characters."""
    return "".join(character if character.isprintable() else "�" for character in text)
