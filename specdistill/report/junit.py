"""junit.xml: a test case for each gate rule, for any CI to list. A warning is a skipped case with a message: visible, no failure."""

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from specdistill.report.phrases import measured, outcome, requirement, scope, title


def to_junit(report: Mapping[str, Any]) -> str:
    rules = report["gate"]["rules"]
    outcomes = [outcome(rule) for rule in rules]
    suite = ElementTree.Element("testsuite", name=_printable(title(report)), timestamp=report["created"])
    counts = {"tests": len(rules), "failures": outcomes.count("failed"), "errors": 0, "skipped": outcomes.count("warning")}
    suite.attrib.update((name, str(count)) for name, count in counts.items())
    for rule, result in zip(rules, outcomes, strict=True):
        name = f"{rule['metric']} {requirement(rule)} [{scope(rule)}]"
        case = ElementTree.SubElement(suite, "testcase", classname="gate", name=_printable(name))
        evidence = _printable(f"{measured(rule)}: {rule['reason']}")
        if result == "failed":
            ElementTree.SubElement(case, "failure", message=evidence)
        elif result == "warning":
            ElementTree.SubElement(case, "skipped", message=f"warning: {evidence}")
        else:
            ElementTree.SubElement(case, "system-out").text = evidence
    ElementTree.indent(suite)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(suite, encoding="unicode")}\n'


def _printable(text: str) -> str:
    """XML cannot hold most control characters."""
    return "".join(character if character.isprintable() else "�" for character in text)
