"""The Python code of docs/python.md and its notebook runs, in the order in which it stands."""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

import specdistill
from specdistill.common.project import RECIPES, ROOT
from tests.documented import read_page
from tests.tiny import tiny_target_model, tiny_tokenizer

PAGE, NOTEBOOK = ROOT / "docs" / "python.md", ROOT / "docs" / "python.ipynb"
# Values that make a recipe small. The page names the recipe, and finds the small one in the folder
# where it runs.
SMALL = {
    "train": {"max_steps": 2, "eval_steps": 2, "save_steps": 2, "per_device_train_batch_size": 2},
    "data": {"max_length": 64, "regenerate": None},
    "eval": {
        "num_prompts": 2,
        "max_new_tokens": 12,
        "repeats": 1,
        "warmup": 0,
        "sampling_draws": 0,
    },
}


def read_blocks(page: Path) -> list[str]:
    if page.suffix == ".ipynb":
        return [
            "".join(cell["source"])
            for cell in json.loads(read_page(page))["cells"]
            if cell["cell_type"] == "code"
        ]
    return re.findall(r"^```python\n(.*?)^```", read_page(page), re.MULTILINE | re.DOTALL)


def run_page(page: Path) -> dict[str, object]:
    names: dict[str, object] = {}
    for block in read_blocks(page):
        exec(compile(block, page.name, "exec"), names)
    return names


def make_small(recipe: str, **more: object) -> None:
    values = yaml.safe_load(read_page(RECIPES / f"{recipe}.yaml"))
    values["train"].pop("num_train_epochs", None)  # SMALL sets steps
    for section, keys in {**SMALL, **more}.items():
        values[section] = {**values[section], **keys}  # type: ignore[dict-item]
    Path(recipe).parent.mkdir()
    Path(recipe).write_text(yaml.safe_dump(values), encoding="utf-8")


@pytest.mark.parametrize("page", [PAGE, NOTEBOOK], ids=lambda page: page.name)
def test_the_package_has_the_names_that_a_page_imports(page: Path) -> None:
    imports = [
        node
        for block in read_blocks(page)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom)
    ]
    names = {alias.name for node in imports if node.module == "specdistill" for alias in node.names}
    assert (
        {"generate", "judge", "load_draft", "load_target", "measure", "train"}
        <= names
        <= set(dir(specdistill))
    )


def test_a_gated_draft_takes_at_most_fifteen_lines() -> None:
    first = [line for line in read_blocks(PAGE)[0].splitlines() if line]
    assert all(f"{name}(" in "\n".join(first) for name in ("train", "measure", "judge"))
    assert len(first) <= 15


def test_a_notebook_is_kept_without_its_outputs() -> None:
    cells = [
        cell for cell in json.loads(read_page(NOTEBOOK))["cells"] if cell["cell_type"] == "code"
    ]
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"]] == []


@pytest.mark.long  # two trainings, a measurement and a comparison
def test_the_page_runs(in_empty_folder: Path) -> None:
    (in_empty_folder / "path" / "to").mkdir(parents=True)
    target = tiny_target_model()
    target.config.max_position_embeddings = 1024
    target.save_pretrained("path/to/model")
    tiny_tokenizer().save_pretrained("path/to/model")
    rows = [
        {"text": f"Once upon a time there were {n} cats and {n * n} dogs. " * 2} for n in range(60)
    ]
    for name, part in (("conversations", rows), ("prompts", rows[:4])):
        Path("path", "to", f"{name}.jsonl").write_text(
            "".join(f"{json.dumps(row)}\n" for row in part), encoding="utf-8"
        )
    make_small("small/eagle3")
    names = run_page(PAGE)
    assert {type(names[name]).__name__ for name in ("report", "decision")} == {"Report"}
    assert (
        Path("runs/python/report/release/report.json").is_file()
        and Path("runs/rows.jsonl").is_file()
    )


@pytest.mark.long  # a training and a measurement of pico
def test_the_notebook_runs(in_empty_folder: Path) -> None:
    make_small("pico/eagle3")
    run_page(NOTEBOOK)
    assert Path("runs/notebook/report/default/report.json").is_file()
