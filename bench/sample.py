"""Write the sample report of the documentation and the README's picture, from a report.

    python -m bench.sample  # of runs/demo/report, which `make demo` leaves
    python -m bench.sample report=runs/mine/report

The present sample is the report of `make demo`.
report.json, samples.jsonl and report.md go to docs/sample/, and the picture to
docs/images/report.svg. The site renders the page itself.
"""

import shutil
import sys
from pathlib import Path

from specdistill.cli.command import run
from specdistill.common.project import ROOT
from specdistill.evaluation.report.files import REPORT, SAMPLES, read_report, to_picture
from specdistill.evaluation.report.text import to_markdown
from specdistill.recipe.fields import Section, option

FOLDER = ROOT / "docs" / "sample"
PICTURE = ROOT / "docs" / "images" / "report.svg"


class SampleOptions(Section):
    """The options of this script."""

    report: str = option("runs/demo/report", "folder of the report to copy")


def main(options: SampleOptions) -> None:
    """Copy a report into docs/sample/, and write its Markdown page and its picture."""
    source = Path(options.report)
    report, records = read_report(source)
    FOLDER.mkdir(exist_ok=True)

    # Copy the files, unless the report is the one in docs/sample/ already.
    for name in (REPORT, SAMPLES):
        if source.resolve() != FOLDER:
            shutil.copyfile(source / name, FOLDER / name)
    (FOLDER / "report.md").write_text(to_markdown(report), encoding="utf-8")
    PICTURE.write_text(to_picture(report, records), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run(main, SampleOptions))
