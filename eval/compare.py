"""Compare drafts for one target in one paired run: comparison.json, .md and .html, and each candidate's own report.

python eval/compare.py target=pico drafts=runs/demo/draft,runs/small/draft,ngram suite=pico output_dir=runs/comparison
python eval/compare.py target=path/to/model drafts=org/draft@v1,org/draft@v2 suite=path/to/prompts.jsonl output_dir=runs/comparison
"""

import sys
from pathlib import Path

from specdistill.command import COMPARE, run
from specdistill.comparison.compare import compare
from specdistill.comparison.measure import measure_candidates
from specdistill.comparison.options import CommonOptions, CompareOptions
from specdistill.comparison.pages import FILES, print_comparison, write_comparison
from specdistill.errors import ExitCode, UserError
from specdistill.report.files import check_replaceable
from specdistill.terminal import result


def main(options: CommonOptions) -> ExitCode:
    folder = Path(options.output_dir)
    check_replaceable(folder, "output_dir", FILES)
    try:
        measured = measure_candidates(options)
    except UserError as error:  # what decodes names its keys as recipes do, whose section this command does not have
        error.key, error.args = error.key.removeprefix("eval."), (str(error).removeprefix("eval."),)
        raise
    comparison = compare(measured, seed=options.seed)
    write_comparison(folder, comparison, {entry.name: entry.records for entry in measured})
    print_comparison(comparison, folder)
    result(comparison)
    return ExitCode.DONE if all(entry["lossless"] for entry in comparison["ranking"]) else ExitCode.CHECK_FAILED


if __name__ == "__main__":
    sys.exit(run(main, CompareOptions, shorthands=COMPARE))
