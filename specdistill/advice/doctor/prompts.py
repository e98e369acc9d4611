"""Choose the prompts on which the doctor tries a draft.

They are text of the kind that the draft was trained for, as far as that is known.
"""

from pathlib import Path

from specdistill.common.documents import read_keys
from specdistill.common.errors import join_lines
from specdistill.data.rows.files import cache_folder, hash_tokenizer
from specdistill.data.rows.row_set import is_whole, read_rows
from specdistill.evaluation.suites.suite import TEXT_PROMPT_TOKENS, load_suite, tokenize
from specdistill.methods.recipe import Recipe, TrainedRecipe
from specdistill.recipe.load import ARGUMENTS_WITHOUT_CODE, load_recipe
from specdistill.recipe.sections import DataConfig
from specdistill.targets.frozen import FrozenTarget

KEY = "draft"
# Paths in the folder of a run.
RECIPE, PROVENANCE = "run/recipe.yaml", "run/provenance.json"
# Tokens generated for each prompt. Completions repeat themselves later on, so short ones accept
# less than long ones.
NUM_TOKENS = 96
DEFAULT_SUITE = "pico-short"  # lines of Python, which need no chat template
Ids = tuple[int, ...]


def run_of(draft: Path) -> Path | None:
    """Return the folder of the run that holds a draft or an export of it.

    Returns:
        The folder; None if the draft is in no run.
    """
    return next((folder for folder in draft.resolve().parents if (folder / RECIPE).is_file()), None)


def read_run_recipe(run: Path) -> Recipe:
    """Return the recipe that a run recorded."""
    return load_recipe(Recipe, [f"recipe={run / RECIPE}", *ARGUMENTS_WITHOUT_CODE])


def select_prompts(
    run: Path | None, suite: str | None, target: FrozenTarget, num_prompts: int
) -> tuple[list[Ids], str, bool]:
    """Return prompts on which to try a draft.

    They come from the suite if one is named, else from the suite in the run's recipe, else from the
    rows that its training held out, else from DEFAULT_SUITE.

    Args:
        run: the folder of the draft's run; None if it is in no run.
        suite: the name or file of a suite; None for none.
        target: the target, whose tokenizer is used.
        num_prompts: the most prompts.

    Returns:
        The token ids of each prompt, a description of the prompts in words, and whether they are
        known to be the kind of text that the draft is for.

    Raises:
        UserError: for a suite that cannot be read, or does not fit the target.
    """
    # Look for a named suite: in the options, then in the recipe of the run.
    recipe = read_run_recipe(run) if run else None
    suite_name = suite or (recipe and recipe.eval.suite)
    ids = (
        _select_held_out_prompts(run, recipe.data, target, num_prompts)
        if run and isinstance(recipe, TrainedRecipe) and not suite_name
        else []
    )

    # Without one, take held-out rows. Without these, take the default suite, whose text the draft
    # may not be for.
    what = f"the held-out rows of {run}"
    is_known = bool(suite_name or ids)
    if not ids:
        ids = [
            prompt.token_ids
            for prompt in tokenize(
                load_suite(suite_name or DEFAULT_SUITE),
                target.tokenizer,
                num_prompts=num_prompts,
                max_new_tokens=NUM_TOKENS,
                max_length=target.max_length,
                vocab_size=target.vocab_size,
            )
        ]
        what = f"suite {suite_name or DEFAULT_SUITE}"

    # Show the beginning of the first prompt, so that a reader sees what kind of text it is.
    first = join_lines(target.tokenizer.decode(ids[0], skip_special_tokens=True))
    return ids, f"{len(ids)} of {what}, the first: {first[:60]!r}", is_known


def _select_held_out_prompts(
    run: Path, data: DataConfig, target: FrozenTarget, num_prompts: int
) -> list[Ids]:
    """Return prompts from the rows that a run held out.

    The rows are spread over all rows that the run held out. Of each row, the prompt is the part of
    the first document before its first loss token. If the document has no such part, it is the
    first half, up to TEXT_PROMPT_TOKENS tokens.

    Returns:
        The token ids of each prompt; empty if the rows are not on this machine, or were made with
        another tokenizer.
    """
    # Find the folder of the rows: named in the recipe, or in the cache under their fingerprint.
    fingerprint = str(
        read_keys(run / PROVENANCE, KEY, "a run with its record").get("data_fingerprint")
    )
    folder = Path(
        data.rows or cache_folder(data.cache_dir) / "rows" / fingerprint.removesuffix("-train")
    )
    if not is_whole(folder):
        return []

    # Token ids of another tokenizer would be other text.
    _, rows, manifest = read_rows(folder)
    if manifest.fit.tokenizer != hash_tokenizer(target.tokenizer):
        return []

    # Take rows at even distances. The prompt ends where the first answer begins.
    prompts = []
    for row in rows.select(range(0, len(rows), max(1, len(rows) // num_prompts))):
        length = row["document_ids"].count(0)
        begin = [*row["loss_mask"][:length], 1].index(1)
        ids = row["input_ids"][
            : begin if 0 < begin < length else min(TEXT_PROMPT_TOKENS, length // 2)
        ]
        prompts += [tuple(ids)] if len(ids) + NUM_TOKENS <= target.max_length else []
    return prompts[:num_prompts]
