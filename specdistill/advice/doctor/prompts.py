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
# Tokens generated for each prompt. Later parts of a completion repeat earlier ones, so a short
# completion has a lower acceptance than a long one.
NUM_TOKENS = 96
DEFAULT_SUITE = "pico-short"  # lines of Python, which need no chat template
Ids = tuple[int, ...]


def run_of(draft: Path) -> Path | None:
    """Find the training run that a draft comes from.

    Args:
        draft: the folder of a draft, or of an export of a draft.

    Returns:
        The folder of the run, which is the nearest parent folder with a recorded recipe; None if
        there is none.
    """
    return next((folder for folder in draft.resolve().parents if (folder / RECIPE).is_file()), None)


def read_run_recipe(run: Path) -> Recipe:
    """Read the recipe that a run has recorded, without running code that the target may have."""
    return load_recipe(Recipe, [f"recipe={run / RECIPE}", *ARGUMENTS_WITHOUT_CODE])


def select_prompts(
    run: Path | None, suite: str | None, target: FrozenTarget, num_prompts: int
) -> tuple[list[Ids], str, bool]:
    """Choose the prompts on which the doctor tries a draft.

    They come from the first of these that exists: the suite that the user names, the suite in the
    run's recipe, the rows that the run held out from training, the suite `pico-short`.

    Args:
        run: the folder of the draft's training run; None if the draft is in no run.
        suite: the name or file of a suite that the user names; None for none.
        target: the target, whose tokenizer is used.
        num_prompts: the largest number of prompts.

    Returns:
        The token ids of each prompt; a description of the prompts in words; whether the prompts
        are known to be the kind of text that the draft was trained for.

    Raises:
        UserError: for a suite that cannot be read, or does not fit the target.
    """
    # Take the suite that the user names, or that of the run's recipe. If there is neither, take
    # rows that the run held out from training.
    recipe = read_run_recipe(run) if run else None
    suite_name = suite or (recipe and recipe.eval.suite)
    ids = (
        _select_held_out_prompts(run, recipe.data, target, num_prompts)
        if run and isinstance(recipe, TrainedRecipe) and not suite_name
        else []
    )

    # Without held-out rows, load the prompts of the suite. The default suite is lines of Python,
    # which the draft may not have been trained for.
    source = f"the held-out rows of {run}"
    is_trained_kind = bool(suite_name or ids)
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
        source = f"suite {suite_name or DEFAULT_SUITE}"

    # Show the beginning of the first prompt, so that a reader sees what kind of text it is.
    first = join_lines(target.tokenizer.decode(ids[0], skip_special_tokens=True))
    return ids, f"{len(ids)} of {source}, the first: {first[:60]!r}", is_trained_kind


def _select_held_out_prompts(
    run: Path, data: DataConfig, target: FrozenTarget, num_prompts: int
) -> list[Ids]:
    """Make prompts from the packed rows that a run held out from training.

    The prompt of a row is the beginning of its first document, up to the first token with a loss,
    which is the first token of an answer. If the document begins with a loss, or has none, its
    first half is taken, but at most TEXT_PROMPT_TOKENS tokens.

    Args:
        run: the folder of the run.
        data: the section `data` of the run's recipe.
        target: the target.
        num_prompts: the largest number of prompts.

    Returns:
        The token ids of each prompt; empty if the rows are not on this machine, or were made with
        another tokenizer.
    """
    # Find the folder of the rows. It is named in the recipe, or is in the cache, where its name is
    # the fingerprint of the rows. The run recorded the fingerprint of the training part, which has
    # the suffix `-train`.
    fingerprint = str(
        read_keys(run / PROVENANCE, KEY, "a run with its record").get("data_fingerprint")
    )
    folder = Path(
        data.rows or cache_folder(data.cache_dir) / "rows" / fingerprint.removesuffix("-train")
    )
    if not is_whole(folder):
        return []

    # With another tokenizer the token ids of the rows would mean another text.
    _, rows, manifest = read_rows(folder)
    if manifest.fit.tokenizer != hash_tokenizer(target.tokenizer):
        return []

    # Take rows at even distances. The first document of a row has the document id 0. A prompt that
    # leaves too little context for a completion is skipped.
    prompts = []
    for row in rows.select(range(0, len(rows), max(1, len(rows) // num_prompts))):
        length = row["document_ids"].count(0)
        # Find the first token with a loss. The appended 1 makes this the end of the document if no
        # token has a loss.
        answer_start = [*row["loss_mask"][:length], 1].index(1)
        num_prompt_tokens = min(TEXT_PROMPT_TOKENS, length // 2)
        if 0 < answer_start < length:
            num_prompt_tokens = answer_start
        ids = row["input_ids"][:num_prompt_tokens]
        prompts += [tuple(ids)] if len(ids) + NUM_TOKENS <= target.max_length else []
    return prompts[:num_prompts]
