"""Measure several drafts of one target, rank them, and write the pages of the comparison.

The drafts take turns prompt by prompt, so that a slow minute of the machine affects all of them.
"""

from pathlib import Path

from specdistill.common.errors import UserError, announce_resumption
from specdistill.evaluation.comparison.candidates import measure_candidates
from specdistill.evaluation.comparison.compare import compare
from specdistill.evaluation.comparison.options import CommonOptions
from specdistill.evaluation.comparison.pages import FILES, write_comparison
from specdistill.evaluation.measurement.cache import CACHE_FOLDER, discard_cache
from specdistill.evaluation.report.files import check_replaceable


def compare_drafts(options: CommonOptions) -> dict[str, object]:
    """Measure and rank drafts, and write the comparison with its pages to `output_dir`.

    Args:
        options: the target, the drafts, and the settings of the measurement.

    Returns:
        The content of comparison.json.

    Raises:
        UserError: for a draft, suite or setting that cannot be measured. The error names the key.
    """
    # For a quick look, lower the settings. Then refuse a folder that holds other files, before the
    # measurement, which may take hours.
    options = options.limit_quick_look()
    folder = Path(options.output_dir)
    check_replaceable(folder, "output_dir", FILES)

    # Measure all drafts in turns. Every decoded batch is cached in the folder, so that the same
    # command, typed again after an interruption, continues from there.
    try:
        with announce_resumption():
            candidates = measure_candidates(options, folder / CACHE_FOLDER)
    except UserError as error:
        # Errors of the measurement name keys as in a recipe, such as `eval.num_prompts`. In this
        # command the same key is called `num_prompts`.
        error.key = error.key.removeprefix("eval.")
        error.args = (str(error).removeprefix("eval."),)
        raise

    # Rank the drafts, and write the pages. The cache of decoded batches is not needed any more.
    comparison = compare(candidates, seed=options.seed)
    records_by_name = {candidate.name: candidate.records for candidate in candidates}
    write_comparison(folder, comparison, records_by_name)
    discard_cache(folder / CACHE_FOLDER)
    return comparison
