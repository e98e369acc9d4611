"""The README's figures are those of the pages that they link to.

Its table of engines is what the methods state.
"""

import re
from collections.abc import Iterator

import pytest

from specdistill.common.project import ROOT
from specdistill.evaluation.report.files import read_report
from specdistill.evaluation.report.text import print_gate
from specdistill.methods import METHODS
from specdistill.serving.engines import ENGINES

README = (ROOT / "README.md").read_text(encoding="utf-8")
# The columns of the table of engines, and the tests that decode in the engine.
ENGINES_OF_COLUMNS = {
    "vLLM": ("vllm", "test_vllm.py"),
    "SGLang": ("sglang", None),
    "llama.cpp": ("gguf", "test_llama_cpp.py"),
    "TensorRT-LLM": ("trtllm", None),
}


def read_page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def list_rows(heading: str) -> Iterator[list[str]]:
    """Yield the rows of the first table below a heading, without the line of dashes."""
    section = README.split(f"## {heading}\n")[1].split("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("|") and not line.startswith("|-"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_readme_is_short() -> None:
    words = [word for word in README.split() if re.search(r"\w", word)]
    assert len(words) <= 900


def test_figures_stand_on_the_pages_that_they_link_to() -> None:
    smollm2 = read_page("smollm2.md")
    assert "1.76× (1.67 to 1.86)" in smollm2 and "20 min 53 s" in smollm2
    assert "1.76× plain decoding (95 % CI 1.67–1.86)" in README
    engines = re.findall(r"here \| difference.*?\n\n", smollm2, re.DOTALL)[0]
    differences = re.findall(r"([−+]?[\d.]+)% \|", engines)
    assert max(float(value.replace("−", "")) for value in differences) <= 1.5, differences
    assert re.search(
        r"1 × 2,048 \| speculators, sdpa .* 2\.77× .* 28% \|", read_page("performance.md")
    )
    assert "## Decoded losslessly: 144\n" in read_page("targets.md")
    counts = re.findall(r"^## [^\n]*: (\d+)$", read_page("targets.md"), re.MULTILINE)
    num_decoded, num_other, _ = map(int, counts)
    assert num_decoded + num_other == 179


def test_gate_lines_are_those_of_the_sample_report(capsys: pytest.CaptureFixture[str]) -> None:
    print_gate(read_report(ROOT / "docs" / "sample")[0])
    printed = capsys.readouterr().out.splitlines()
    (block,) = re.findall(r"```text\n(passed .*?)```", README, re.DOTALL)
    assert len(block.splitlines()) == 2
    assert set(block.splitlines()) <= set(printed)


def test_recipes_have_the_computed_figures() -> None:
    table = read_page("recipes.md")
    rows = list(list_rows("Recipes"))[1:]
    assert len(rows) == 6
    for recipe, gpus, hours, disk in rows:
        line = re.search(rf"^\| \[{re.escape(recipe)}\].*$", table, re.MULTILINE)[0]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert f"8 GPUs of {gpus.removeprefix('8 × ')}" in cells[3], recipe
        assert [hours, disk] == cells[-2:], recipe


def test_every_method_has_what_its_engines_state() -> None:
    header, *rows = list_rows("Methods and engines")
    assert header[2:] == list(ENGINES_OF_COLUMNS)
    assert {row[0].strip("`") for row in rows} == set(METHODS)
    for name, train, *cells in rows:
        method = METHODS[name.strip("`")]
        assert (train == "yes") == method.is_trained
        for (engine, tests), cell in zip(ENGINES_OF_COLUMNS.values(), cells, strict=True):
            assert engine in ENGINES
            serving = method.serving().get(engine)
            assert (cell == "–") == (serving is None), (name, engine)
            if cell == "loader checked":
                assert serving.loaders, (name, engine)
            if cell == "run here":
                engine_tests = (ROOT / "tests" / "with_engines" / tests).read_text(encoding="utf-8")
                assert name.strip("`") in engine_tests or "n-gram" in engine_tests, (name, engine)
