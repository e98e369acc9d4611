r"""Compare drafts for one target in one paired run.

This writes comparison.json, comparison.md and comparison.html, and a report of each draft.

python eval/compare.py target=pico drafts=runs/demo/draft,runs/small/draft,ngram suite=pico \
    output_dir=runs/comparison
python eval/compare.py target=path/to/model drafts=org/draft@v1,org/draft@v2 \
    suite=path/to/prompts.jsonl output_dir=runs/comparison
"""

import sys
from pathlib import Path

from specdistill.cli.command import run
from specdistill.cli.compare import print_ranking
from specdistill.common.errors import ExitCode
from specdistill.evaluation.comparison.options import CommonOptions, CompareOptions
from specdistill.recipe.short_keys import COMPARE
from specdistill.workflows.compare import compare_drafts


def main(options: CommonOptions) -> ExitCode:
    """Measure several drafts for one target, and print their ranking.

    Returns:
        An exit code that says whether the output of all drafts was lossless.
    """
    comparison = compare_drafts(options)
    return print_ranking(comparison, Path(options.output_dir))


if __name__ == "__main__":
    sys.exit(run(main, CompareOptions, shorthands=COMPARE))
