"""Measure several drafts of one target in one interleaved run, rank them, and write the pages."""

from pathlib import Path

from specdistill.common.errors import UserError
from specdistill.evaluation.comparison.candidates import measure_candidates
from specdistill.evaluation.comparison.compare import compare
from specdistill.evaluation.comparison.options import CommonOptions
from specdistill.evaluation.comparison.pages import FILES, write_comparison
from specdistill.evaluation.measurement.cache import CACHE_FOLDER, discard_cache
from specdistill.evaluation.report.files import check_replaceable


def compare_drafts(options: CommonOptions) -> dict[str, object]:
    """Measure and rank drafts, and write the comparison with its pages to `output_dir`.

    Returns:
        The content of comparison.json.

    Raises:
        UserError: for what cannot be measured, naming the key.
    """
    folder = Path(options.output_dir)
    check_replaceable(folder, "output_dir", FILES)

    # Measure all candidates in turns. Finished work is kept, so that a repeated command resumes.
    try:
        candidates = measure_candidates(options, folder / CACHE_FOLDER)
    except UserError as error:
        # Decoding names its keys as recipes do, in a section `eval`. This command has none.
        error.key = error.key.removeprefix("eval.")
        error.args = (str(error).removeprefix("eval."),)
        raise

    # Rank them, and write the pages.
    comparison = compare(candidates, seed=options.seed)
    write_comparison(
        folder, comparison, {candidate.name: candidate.records for candidate in candidates}
    )
    discard_cache(folder / CACHE_FOLDER)
    return comparison
