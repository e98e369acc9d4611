"""Compare drafts for one target in one paired run: comparison.json, .md and .html, and each candidate's own report.

python eval/compare.py target=pico drafts=runs/demo/draft,runs/small/draft,ngram suite=pico output_dir=runs/comparison
python eval/compare.py target=path/to/model drafts=org/draft@v1,org/draft@v2 suite=path/to/prompts.jsonl output_dir=runs/comparison
"""

import sys
from pathlib import Path

from specdistill.api import compare_drafts
from specdistill.command import COMPARE, run
from specdistill.comparison.options import CommonOptions, CompareOptions
from specdistill.comparison.pages import print_comparison
from specdistill.errors import ExitCode
from specdistill.terminal import result


def main(options: CommonOptions) -> ExitCode:
    comparison = compare_drafts(options)
    print_comparison(comparison, Path(options.output_dir))
    result(comparison)
    return (
        ExitCode.DONE
        if all(entry["lossless"] for entry in comparison["ranking"])
        else ExitCode.CHECK_FAILED
    )


if __name__ == "__main__":
    sys.exit(run(main, CompareOptions, shorthands=COMPARE))
