"""The pages name links, files, modules, recipe keys and keys of commands that exist."""

import re
from itertools import pairwise
from pathlib import Path

from specdistill.common.project import RECIPES, ROOT
from specdistill.methods import METHODS
from specdistill.recipe.load import RECORDED_VARIABLES
from tests.documented import (
    find_commands,
    find_shell_lines,
    find_unknown_keys,
    list_verb_keys,
    read_page,
    remove_examples,
)

EXAMPLES = ROOT / "examples"
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(
    [*(ROOT / "docs").glob("*.md"), *EXAMPLES.rglob("README.md")]
)
CURRENT_PAGES = [
    page for page in PAGES if page.name != "CHANGELOG.md"
]  # which also names what is gone
COMMENTED = [
    *sorted(ROOT.glob("recipes/*/*.yaml")),
    *sorted(ROOT.glob("eval/suites/*.yaml")),
    *sorted(ROOT.glob("eval/gates/*.yaml")),
    *sorted(ROOT.glob("accelerate_configs/*.yaml")),
    *sorted(EXAMPLES.rglob("*.y*ml")),
    *sorted(EXAMPLES.rglob("*.sh")),
]
TRACKED = (
    "specdistill",
    "train",
    "eval",
    "recipes",
    "accelerate_configs",
    "tests",
    "docs",
    "bench",
    *(f"examples/{path.parent.name}" for path in sorted(EXAMPLES.glob("*/README.md"))),
    ".github",
)
IN_TEXT = re.compile(rf"(?<![\w/.-])(?:{'|'.join(map(re.escape, TRACKED))})/[\w./<>*-]*[\w/>*]")
MODULE = re.compile(r"\bspecdistill(?:\.[a-z_0-9]+)+")
ARCHITECTURE = ROOT / "docs" / "architecture.md"
YOURS = "/mine"  # files that a reader is told to write
SECTIONS = ("target", "data", "draft", "loss", "on_policy", "eval")


def is_module(dotted: str) -> bool:
    """Return whether a dotted name is a module of the package, or a name in one."""
    return any(
        (ROOT / f"{path}.py").is_file() or (ROOT / path).is_dir()
        for path in path_and_parent(dotted.replace(".", "/"))
    )


def path_and_parent(path: str) -> tuple[str, str]:
    return path, path.rpartition("/")[0]


def test_relative_links_lead_somewhere() -> None:
    for page in PAGES:
        targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", read_page(page))
        # GitHub resolves ../../actions to the repository's own workflows.
        files = [target for target in targets if not re.search("://|/actions/workflows/", target)]
        assert [target for target in files if not (page.parent / target).exists()] == [], page


def test_files_and_modules_that_pages_name_exist() -> None:
    for page in (*CURRENT_PAGES, *COMMENTED):
        text = (
            read_page(page)
            if page.suffix == ".md"
            else "\n".join(re.findall(r"#.*", read_page(page)))
        )
        text = re.sub(r"https?://\S+", "", text)
        patterns = {
            path: re.sub(r"<\w+>", "*", path).rstrip("/")
            for path in IN_TEXT.findall(text)
            if YOURS not in path
        }
        missing = [
            path for path, pattern in patterns.items() if next(ROOT.glob(pattern), None) is None
        ]
        assert missing + [name for name in MODULE.findall(text) if not is_module(name)] == [], page


def test_recipes_that_pages_name_exist() -> None:
    for page in CURRENT_PAGES:
        names = {
            name
            for pair in re.findall(
                r"recipe=((?:pico|small)/\w+)|`((?:pico|small)/\w+)`", read_page(page)
            )
            for name in pair
        }
        assert [name for name in names - {""} if not (RECIPES / f"{name}.yaml").is_file()] == [], (
            page
        )


def test_commands_take_the_keys_that_they_are_given() -> None:
    for page in CURRENT_PAGES:
        found = find_commands(remove_examples(page))
        assert [
            f"specdistill {verb} … {key}="
            for verb, keys in found
            for key in find_unknown_keys(verb, keys)
        ] == [], page


def test_recipe_keys_that_pages_name_exist() -> None:
    known = list_verb_keys("train") | {
        "data.regenerate",
        "eval.sweep",
        "eval.ngram",
        "eval.suffix",
        "eval.llama_cpp",
        "draft.lora",
        "draft.bytes",  # a number of report.json that a gate limits
    }
    key = re.compile(rf"(?<![\w./-])((?:{'|'.join(SECTIONS)})\.[a-z_]+(?:\.[a-z_]+)*)(?![\w/(-])")
    files = (".py", ".md", ".yaml", ".json", ".jsonl", ".gguf")
    for page in CURRENT_PAGES:
        named = key.findall(remove_examples(page))
        assert [key for key in named if key not in known and not key.endswith(files)] == [], page


def find_unquoted(command: str) -> list[str]:
    """Return the characters of a command outside of quotes and `$(…)` that a shell interprets.

    Bash would expand them, or zsh refuse them where no file matches.
    """
    plain = re.sub(r"\\.|'[^']*'|\"[^\"!]*\"", "", command)
    return re.findall(
        r"[][{}()*?~!]", re.sub(r"\$\(+[^()]*\)+", "", re.split(r"(?:^|\s)#", plain)[0])
    )


def test_bash_and_zsh_read_commands_as_they_are_written() -> None:
    assert find_unquoted(
        "specdistill compare drafts=[a,b] 'x=[1]' \"y={a: 1}\" z=$(cat a)  # it (or) not"
    ) == ["[", "]"]
    for page in CURRENT_PAGES:
        shown = [line.command for line in find_shell_lines(page)] + re.findall(
            r"`([^`\n]+)`", remove_examples(page)
        )
        typed = [
            command
            for command in shown
            if re.match(
                r"'?[a-z_.]+=|(?:specdistill|make|accelerate|python (?:train|eval)/\S+) ", command
            )
        ]
        assert [command for command in typed if find_unquoted(command)] == [], page
    for page in COMMENTED:
        indented = "\n".join(re.findall(r"^#   +(.*)", read_page(page), re.MULTILINE))
        assert [
            line for line in indented.splitlines() if "=" in line and find_unquoted(line)
        ] == [], page


def test_architecture_describes_every_folder_of_the_library() -> None:
    folders = {path.parent.name for path in (ROOT / "specdistill").glob("*/__init__.py")}
    rows = re.findall(r"^\| (`.*?) \|", read_page(ARCHITECTURE), re.MULTILINE)
    assert folders - {name for row in rows for name in re.findall(r"`(\w+)/", row)} == set()


def test_the_package_has_at_most_fourteen_entries_at_the_top() -> None:
    folders = [path.parent for path in (ROOT / "specdistill").glob("*/__init__.py")]
    modules = [
        path for path in (ROOT / "specdistill").glob("*.py") if not path.name.startswith("__")
    ]
    assert len(folders) + len(modules) <= 14


def read_paths() -> dict[str, list[tuple[Path, str]]]:
    """Return the reading paths of the architecture page: heading -> (file, what to look at)."""
    paths = {}
    for section in read_page(ARCHITECTURE).split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        rows = re.findall(r"^\| \[[^\]]+\]\(([^)]+\.py)\) \| (.*) \|$", text, re.MULTILINE)
        if rows:
            paths[heading] = [((ARCHITECTURE.parent / file).resolve(), what) for file, what in rows]
    return paths


def test_reading_paths_name_what_the_files_define() -> None:
    for rows in read_paths().values():
        for file, what in rows:
            names = [name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", what)]
            assert names
            for name in names:
                assert re.search(rf"(?:def|class) {name}\b", read_page(file)), (file, name)


def test_each_file_of_a_reading_path_imports_the_next() -> None:
    paths = read_paths()
    assert {heading: len(rows) for heading, rows in paths.items()} == {
        "Read from a training command to the loss": 5,
        "Read from an evaluation to the accept/reject rule": 5,
        "Read from `specdistill data make` to the generation loop": 3,
        "Read from `specdistill publish` to the upload": 3,
    }
    # A recipe names its method, which the table of methods finds.
    assert type(METHODS["eagle3"].load()).__module__ == "specdistill.methods.eagle3.method"
    for rows in paths.values():
        for (file, _), (next_file, _) in pairwise(rows):
            module = ".".join(next_file.relative_to(ROOT).with_suffix("").parts)
            if module != "specdistill.methods.eagle3.method":
                package, _, name = module.rpartition(".")
                imported = rf"from {re.escape(package)}(?:\.{name} import| import .*\b{name}\b)"
                assert re.search(imported, read_page(file)), (file, module)


def test_the_page_of_environment_variables_is_complete() -> None:
    """The page names the variables that the code reads.

    These are the names that it asks the environment for, and every constant that is written as a
    variable is.
    """
    sources = [
        path.read_text("utf-8")
        for folder in ("specdistill", "eval", "train")
        for path in (ROOT / folder).rglob("*.py")
    ]
    values = {"CAUSAL_LM", "FULL_STATE_DICT", "SHARDED_STATE_DICT"}
    pattern = r'environ(?:\.get\(|\[)f?"([A-Z_]+)|"([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)"'
    read_variables = (
        {name for source in sources for pair in re.findall(pattern, source) for name in pair}
        - values
        - {""}
    )
    page = re.sub(
        r"## Read by libraries.*",
        "",
        (ROOT / "docs" / "environment.md").read_text("utf-8"),
        flags=re.DOTALL,
    )
    named = set(re.findall(r"`([A-Z][A-Z0-9_]*[A-Z0-9])`", page))
    assert {
        name
        for name in read_variables - named
        if not any(name[-1] == "_" and other.startswith(name) for other in named)
    } == set()
    by_python = {"PYTHONPATH", "PYTHONHOME", *RECORDED_VARIABLES}
    assert {
        name
        for name in named - by_python - read_variables
        if not any(other[-1] == "_" and name.startswith(other) for other in read_variables)
    } == set()
