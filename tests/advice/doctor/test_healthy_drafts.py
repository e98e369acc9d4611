"""Drafts of every method, after short and longer trainings, have no problem."""

import json
from pathlib import Path

import pytest

from specdistill.common.errors import ExitCode
from tests.scripts import specdistill

NUM_STORIES = 300
LONG = pytest.mark.long  # trains a draft of a real target
EXTENDED = (LONG, pytest.mark.extended)  # a further training of a method
MASK = ("draft.mask_token_id=0",)  # <unk>, which no story holds
# The recipe, the number of steps, and further keys.
TRAININGS = [
    pytest.param("small/eagle3", 4, (), marks=EXTENDED),
    pytest.param("small/eagle3", 40, ("draft.norm_output=false",), marks=EXTENDED),
    pytest.param("small/eagle3", 150, ("draft.norm_output=true",), marks=LONG),
    pytest.param("small/eagle3", 60, ("draft.vocab_size=256",), marks=EXTENDED),
    pytest.param("small/eagle", 10, (), marks=EXTENDED),
    pytest.param("small/eagle", 100, (), marks=LONG),
    pytest.param("small/mtp", 60, (), marks=LONG),
    pytest.param("small/draft", 20, (), marks=LONG),
    pytest.param("small/dflash", 10, MASK, marks=EXTENDED),
    pytest.param("small/dflash", 100, MASK, marks=LONG),
    pytest.param("small/dspark", 60, MASK, marks=LONG),
]


@pytest.mark.parametrize(("recipe", "num_steps", "keys"), TRAININGS)
def test_a_freshly_trained_draft_has_no_problem(
    recipe: str, num_steps: int, keys: tuple[str, ...], shared_data: Path, tmp_path: Path
) -> None:
    stories = (
        (shared_data / "train/tinystories/tinystories_val_slice.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    (tmp_path / "stories.jsonl").write_text(
        "\n".join(stories[:NUM_STORIES]) + "\n", encoding="utf-8"
    )
    target = f"target.model={shared_data / 'models/stories260K-hf'}"
    trained = specdistill(
        "train",
        f"recipe={recipe}",
        target,
        f"data.source={tmp_path / 'stories.jsonl'}",
        f"data.cache_dir={tmp_path / 'cache'}",
        f"eval.suite={tmp_path / 'stories.jsonl'}",
        f"train.output_dir={tmp_path / 'run'}",
        f"train.max_steps={num_steps}",
        "data.regenerate=null",
        "data.decontaminate=[]",
        "data.max_length=96",
        "train.per_device_train_batch_size=4",
        *keys,
    )
    assert trained.returncode == ExitCode.DONE, trained.stderr
    examined = specdistill("doctor", f"draft={tmp_path / 'run' / 'draft'}", target, "--json")
    problems = [
        finding["what"]
        for finding in json.loads(examined.stdout)["findings"]
        if finding["severity"] == "problem"
    ]
    assert (problems, examined.returncode) == ([], ExitCode.DONE)
