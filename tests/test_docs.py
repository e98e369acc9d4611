"""The pages name things that exist: links, files, modules, recipe keys, and the keys of every command."""

import re
import tomllib

from specdistill.project import RECIPES, ROOT
from specdistill.recipe.load import HARMLESS
from tests.documented import commands, keys_of, read, shell_lines, unknown_keys, without_examples

PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
OF_TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which also names what is gone
COMMENTED = [
    *sorted(ROOT.glob("recipes/*/*.yaml")),
    *sorted(ROOT.glob("eval/suites/*.yaml")),
    *sorted(ROOT.glob("eval/gates/*.yaml")),
    *sorted(ROOT.glob("accelerate_configs/*.yaml")),
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
    ".github",
)
IN_TEXT = re.compile(rf"(?<![\w/.-])(?:{'|'.join(map(re.escape, TRACKED))})/[\w./<>*-]*[\w/>*]")
MODULE = re.compile(r"\bspecdistill(?:\.[a-z_0-9]+)+")
YOURS = "/mine"  # files that a reader is told to write
SECTIONS = ("target", "data", "draft", "loss", "on_policy", "eval")


def is_module(dotted: str) -> bool:
    """A module of the package, or a name in one."""
    return any(
        (ROOT / f"{path}.py").is_file() or (ROOT / path).is_dir()
        for path in parents(dotted.replace(".", "/"))
    )


def parents(path: str) -> tuple[str, str]:
    return path, path.rpartition("/")[0]


def test_relative_links_lead_somewhere() -> None:
    for page in PAGES:
        targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", read(page))
        assert [
            target
            for target in targets
            if "://" not in target and not (page.parent / target).exists()
        ] == [], page


def test_files_and_modules_exist() -> None:
    for page in (*OF_TODAY, *COMMENTED):
        text = read(page) if page.suffix == ".md" else "\n".join(re.findall(r"#.*", read(page)))
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


def test_recipes_exist() -> None:
    for page in OF_TODAY:
        names = {
            name
            for pair in re.findall(
                r"recipe=((?:pico|small)/\w+)|`((?:pico|small)/\w+)`", read(page)
            )
            for name in pair
        }
        assert [name for name in names - {""} if not (RECIPES / f"{name}.yaml").is_file()] == [], (
            page
        )


def test_commands_take_the_keys_that_they_are_given() -> None:
    for page in OF_TODAY:
        found = commands(without_examples(page))
        assert [
            f"specdistill {verb} … {key}="
            for verb, keys in found
            for key in unknown_keys(verb, keys)
        ] == [], page


def test_recipe_keys_exist() -> None:
    known = keys_of("train") | {
        "data.regenerate",
        "eval.sweep",
        "eval.ngram",
        "eval.suffix",
        "eval.llama_cpp",
        "draft.lora",
    }
    key = re.compile(rf"(?<![\w./-])((?:{'|'.join(SECTIONS)})\.[a-z_]+(?:\.[a-z_]+)*)(?![\w/(-])")
    files = (".py", ".md", ".yaml", ".json", ".jsonl", ".gguf")
    for page in OF_TODAY:
        named = key.findall(without_examples(page))
        assert [key for key in named if key not in known and not key.endswith(files)] == [], page


def unquoted(command: str) -> list[str]:
    """The characters of a command that bash would expand, or zsh refuse where no file matches: those outside of quotes and `$(…)`."""
    plain = re.sub(r"\\.|'[^']*'|\"[^\"!]*\"", "", command)
    return re.findall(
        r"[][{}()*?~!]", re.sub(r"\$\(+[^()]*\)+", "", re.split(r"(?:^|\s)#", plain)[0])
    )


def test_bash_and_zsh_read_commands_as_they_are_written() -> None:
    assert unquoted(
        "specdistill compare drafts=[a,b] 'x=[1]' \"y={a: 1}\" z=$(cat a)  # it (or) not"
    ) == ["[", "]"]
    for page in OF_TODAY:
        shown = [line.command for line in shell_lines(page)] + re.findall(
            r"`([^`\n]+)`", without_examples(page)
        )
        typed = [
            it
            for it in shown
            if re.match(
                r"'?[a-z_.]+=|(?:specdistill|make|accelerate|python (?:train|eval)/\S+) ", it
            )
        ]
        assert [command for command in typed if unquoted(command)] == [], page
    for page in COMMENTED:
        indented = "\n".join(re.findall(r"^#   +(.*)", read(page), re.MULTILINE))
        assert [line for line in indented.splitlines() if "=" in line and unquoted(line)] == [], (
            page
        )


def layers() -> list[str]:
    """The layers of the import contract, as the architecture page writes them."""
    contracts = tomllib.loads(read(ROOT / "pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (found,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [layer.replace("specdistill.", "") for layer in found]


def test_architecture_states_the_import_contract() -> None:
    (block,) = re.findall(r"```text\n(.*?)```", read(ROOT / "docs" / "architecture.md"), re.DOTALL)
    assert block.splitlines() == layers()


def test_every_folder_of_the_library_is_described() -> None:
    folders = {path.parent.name for path in (ROOT / "specdistill").glob("*/__init__.py")}
    rows = re.findall(r"^\| (`.*?) \|", read(ROOT / "docs" / "architecture.md"), re.MULTILINE)
    assert folders - {name for row in rows for name in re.findall(r"`(\w+)/", row)} == set()


def test_reading_paths_name_what_the_files_define() -> None:
    page = ROOT / "docs" / "architecture.md"
    rows = re.findall(r"^\| \[[^\]]+\]\(([^)]+\.py)\) \| (.*) \|$", read(page), re.MULTILINE)
    named = [
        (file, name.rpartition(".")[2])
        for file, what in rows
        for name in re.findall(r"`([\w.]+)`", what)
    ]
    assert len(rows) == 9
    assert [
        pair
        for pair in named
        if not re.search(rf"(?:def|class) {pair[1]}\b", read(page.parent / pair[0]))
    ] == []


def test_the_page_of_environment_variables_is_complete() -> None:
    """Names that the code has: those that it asks the environment for, and every constant that is written as a variable is."""
    sources = [
        path.read_text("utf-8")
        for folder in ("specdistill", "eval", "train")
        for path in (ROOT / folder).rglob("*.py")
    ]
    values = {"CAUSAL_LM", "FULL_STATE_DICT", "SHARDED_STATE_DICT"}
    pattern = r'environ(?:\.get\(|\[)f?"([A-Z_]+)|"([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)"'
    read = (
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
        for name in read - named
        if not any(name[-1] == "_" and it.startswith(name) for it in named)
    } == set()
    by_python = {"PYTHONPATH", "PYTHONHOME", *HARMLESS}
    assert {
        name
        for name in named - by_python - read
        if not any(it[-1] == "_" and name.startswith(it) for it in read)
    } == set()
