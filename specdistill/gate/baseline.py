"""The baseline report that a draft is compared with: from a file, a folder, or a revision on the Hub."""

from pathlib import Path

from specdistill.errors import UserError
from specdistill.gate.decide import Evidence
from specdistill.hub import fetch, split_revision
from specdistill.report.files import REPORT, SAMPLES, read_report

HUB_FOLDER = "report"  # of a draft's repository
EXPECTED = "a report.json, its folder, or a Hub id with its revision, as org/name@v1.2"


def read_baseline(name: str, key: str = "baseline") -> Evidence:
    """The report and its records. Of a Hub repository, `report/report.json` and `report/samples.jsonl` are fetched.

    Raises UserError when there is no report or it is not what it should be, ResourceError when the Hub fails.
    """
    if Path(name).exists():
        return Evidence(*read_report(Path(name), key))
    repository, revision = split_revision(name)
    if repository.startswith((".", "/", "~")) or repository.count("/") != 1 or repository.endswith(".json"):
        raise UserError(key, got=f"{name}, which does not exist", expected=EXPECTED)
    files = [f"{HUB_FOLDER}/{file}" for file in (REPORT, SAMPLES)]
    snapshot = fetch(repository, key=key, expected=EXPECTED, revision=revision, patterns=files)
    if not (snapshot / files[0]).is_file():
        raise UserError(key, got=f"{name}, a repository without {files[0]}", expected=EXPECTED)
    return Evidence(*read_report(snapshot / HUB_FOLDER, key))
