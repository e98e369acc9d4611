"""The text on which the doctor tries a draft: what it is for, as far as that is known."""

from pathlib import Path
from typing import Any

from specdistill.errors import one_line
from specdistill.files.documents import read_keys
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import RUNS_NOTHING, load_recipe
from specdistill.rows.files import cache_folder, tokenizer_fingerprint
from specdistill.rows.row_set import is_whole, read_rows
from specdistill.suites.suite import TEXT_PROMPT_TOKENS, load_suite, tokenize
from specdistill.targets.frozen import FrozenTarget

KEY = "draft"
RECIPE, PROVENANCE = "run/recipe.yaml", "run/provenance.json"  # in a run's folder
NUM_TOKENS = 96  # generated for each prompt: completions repeat themselves later on, so short ones accept less than long ones
DEFAULT_SUITE = "pico-short"  # lines of Python, which ask for no chat template
Ids = tuple[int, ...]


def run_of(draft: Path) -> Path | None:
    """The folder of the run that a draft, or an export of it, lies in."""
    return next((folder for folder in draft.resolve().parents if (folder / RECIPE).is_file()), None)


def prompts_of(
    run: Path | None, suite: str | None, target: FrozenTarget, num_prompts: int
) -> tuple[list[Ids], str, bool]:
    """Prompts of the suite, else of that in the run's recipe, else of what its training held out, else plain ones: the target's tokens of
    each, what they are in words, and whether they are known to be what the draft is for.

    Raises UserError for a suite that cannot be read, or does not fit the target.
    """
    recipe = load_recipe(Recipe, [f"recipe={run / RECIPE}", *RUNS_NOTHING]) if run else None
    named = suite or (recipe and recipe.eval.suite)
    ids = _held_out(run, recipe, target, num_prompts) if run and not named else []
    what, is_known = f"the held-out rows of {run}", bool(named or ids)
    if not ids:
        limits = {
            "max_new_tokens": NUM_TOKENS,
            "max_length": target.max_length,
            "vocab_size": target.vocab_size,
        }
        suite_rows = load_suite(named or DEFAULT_SUITE)
        ids = [
            prompt.token_ids
            for prompt in tokenize(suite_rows, target.tokenizer, num_prompts=num_prompts, **limits)
        ]
        what = f"suite {named or DEFAULT_SUITE}"
    first = one_line(target.tokenizer.decode(ids[0], skip_special_tokens=True))
    return ids, f"{len(ids)} of {what}, the first: {first[:60]!r}", is_known


def _held_out(run: Path, recipe: Any, target: FrozenTarget, num_prompts: int) -> list[Ids]:
    """What comes before the first loss token of a document, in rows over all that the run held out; empty where they are not here."""
    made = str(read_keys(run / PROVENANCE, KEY, "a run with its record").get("data_fingerprint"))
    folder = Path(
        recipe.data.rows
        or cache_folder(recipe.data.cache_dir) / "rows" / made.removesuffix("-train")
    )
    if not is_whole(folder):
        return []
    _, rows, manifest = read_rows(folder)
    if manifest.fit.tokenizer != tokenizer_fingerprint(target.tokenizer):
        return []
    found = []
    for row in rows.select(range(0, len(rows), max(1, len(rows) // num_prompts))):
        length = row["document_ids"].count(0)
        begin = [*row["loss_mask"][:length], 1].index(1)
        ids = row["input_ids"][
            : begin if 0 < begin < length else min(TEXT_PROMPT_TOKENS, length // 2)
        ]
        found += [tuple(ids)] if len(ids) + NUM_TOKENS <= target.max_length else []
    return found[:num_prompts]
