"""The pages name things that exist: links, files, modules, recipe keys, and the keys of every command."""

import ast
import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from specdistill.cli import VERBS, main
from specdistill.project import RECIPES, ROOT

PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").glob("*.md"))
OF_TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which also names what is gone
COMMENTED = [
    *sorted(ROOT.glob("recipes/*/*.yaml")),
    *sorted(ROOT.glob("eval/suites/*.yaml")),
    *sorted(ROOT.glob("eval/gates/*.yaml")),
    *sorted(ROOT.glob("accelerate_configs/*.yaml")),
]
TRACKED = ("specdistill", "train", "eval", "recipes", "accelerate_configs", "tests", "docs", "bench", ".github")
IN_TEXT = re.compile(rf"(?<![\w/.-])(?:{'|'.join(map(re.escape, TRACKED))})/[\w./<>*-]*[\w/>*]")
MODULE = re.compile(r"\bspecdistill(?:\.[a-z_0-9]+)+")
YOURS = "/mine"  # files that a reader is told to write
SECTIONS = ("target", "data", "draft", "loss", "on_policy", "eval")
SCRIPTS = {"train/eagle.py": "train", "train/mtp.py": "train", "train/draft.py": "train", "eval/run.py": "eval"}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
every_page_of_today = pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: page.name)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def is_module(dotted: str) -> bool:
    """A module of the package, or a name in one."""
    return any((ROOT / f"{path}.py").is_file() or (ROOT / path).is_dir() for path in parents(dotted.replace(".", "/")))


def parents(path: str) -> tuple[str, str]:
    return path, path.rpartition("/")[0]


@every_page
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", read(page))
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", [*OF_TODAY, *COMMENTED], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_modules_exist(page: Path) -> None:
    text = read(page) if page.suffix == ".md" else "\n".join(re.findall(r"#.*", read(page)))
    text = re.sub(r"https?://\S+", "", text)
    patterns = {path: re.sub(r"<\w+>", "*", path).rstrip("/") for path in IN_TEXT.findall(text) if YOURS not in path}
    missing = [path for path, pattern in patterns.items() if next(ROOT.glob(pattern), None) is None]
    assert missing + [name for name in MODULE.findall(text) if not is_module(name)] == []


@every_page_of_today
def test_recipes_exist(page: Path) -> None:
    names = re.findall(r"recipe=((?:pico|small)/\w+)|`((?:pico|small)/\w+)`", read(page))
    assert [name for pair in names for name in pair if name and not (RECIPES / f"{name}.yaml").is_file()] == []


@cache
def keys_of(verb: str) -> frozenset[str]:
    """The keys that `specdistill <verb> --help` lists. Those of eval and gate are read from their scripts, which import too much."""
    if verb == "eval":
        (shorthands,) = re.findall(r"^SHORTHANDS = (\{.*?\})$", read(ROOT / "eval" / "run.py"), re.MULTILINE | re.DOTALL)
        return keys_of("train") | ast.literal_eval(shorthands).keys()
    if verb == "gate":
        return frozenset(re.findall(r"^    (\w+): .* = (?:option|like)\(", read(ROOT / "eval" / "gate.py"), re.MULTILINE))
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main([verb, "--help"])
    return frozenset(re.findall(r"^  (\S+) ", printed.getvalue(), re.MULTILINE)) | {"recipe"}


def examples_left_out(page: Path) -> str:
    """A page without its blocks of plain text, where mistakes are shown."""
    return re.sub(r"```text\n.*?```", "", read(page), flags=re.DOTALL)


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(verb, keys) of each command in a page: in fenced blocks, indented blocks and inline code."""
    text = re.sub(r"\\\n", " ", examples_left_out(page))
    for line in text.splitlines():
        spans = re.findall(r"`([^`]+)`", line) if "`" in line else [line]
        for span in spans:
            for verb, rest in re.findall(r"\bspecdistill (\w+) +(.*)", span):
                if verb in VERBS:
                    yield verb, keys_in(rest)
            for script, rest in re.findall(r"\b((?:train|eval)/\w+\.py) +(.*)", span):
                if script in SCRIPTS:
                    yield SCRIPTS[script], keys_in(rest)


def keys_in(rest: str) -> list[str]:
    words = shlex.split(rest.replace("…", "").replace("'{…}'", ""), comments=True)
    return [word.partition("=")[0] for word in words if re.match(r"[a-z_.]+=", word)]


@every_page_of_today
def test_commands_take_the_keys_that_they_are_given(page: Path) -> None:
    wrong = [
        f"specdistill {verb} … {key}="
        for verb, keys in commands(page)
        for key in keys
        if key not in keys_of(verb) and not key.startswith("train.")
    ]
    assert wrong == []


@every_page_of_today
def test_recipe_keys_exist(page: Path) -> None:
    known = keys_of("train") | {"data.regenerate", "eval.sweep", "eval.ngram", "draft.lora"}
    named = re.findall(rf"(?<![\w./-])((?:{'|'.join(SECTIONS)})\.[a-z_]+(?:\.[a-z_]+)*)(?![\w/(-])", examples_left_out(page))
    files = (".py", ".md", ".yaml", ".json", ".jsonl")
    assert [key for key in named if key not in known and not key.endswith(files)] == []


def layers() -> list[str]:
    """The layers of the import contract, as the architecture page writes them."""
    contracts = tomllib.loads(read(ROOT / "pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (found,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [layer.replace("specdistill.", "") for layer in found]


def test_architecture_states_the_import_contract() -> None:
    (block,) = re.findall(r"```text\n(.*?)```", read(ROOT / "docs" / "architecture.md"), re.DOTALL)
    assert block.splitlines() == layers()


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_every_folder_of_the_library_is_described(page: str) -> None:
    folders = {path.parent.name for path in (ROOT / "specdistill").glob("*/__init__.py")}
    described = {
        name for row in re.findall(r"^\| (`.*?) \|", read(ROOT / page), re.MULTILINE) for name in re.findall(r"`(\w+)/", row)
    }
    assert folders and folders - described == set()


def test_reading_paths_name_what_the_files_define() -> None:
    page = ROOT / "docs" / "architecture.md"
    rows = re.findall(r"^\| \[[^\]]+\]\(([^)]+\.py)\) \| (.*) \|$", read(page), re.MULTILINE)
    named = [(file, name.rpartition(".")[2]) for file, what in rows for name in re.findall(r"`([\w.]+)`", what)]
    assert len(rows) == 7
    assert [pair for pair in named if not re.search(rf"(?:def|class) {pair[1]}\b", read(page.parent / pair[0]))] == []
