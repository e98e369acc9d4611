"""Generate the pages of the reference from the code: commands, recipe keys, Python API, report.

docs/site.py adds these pages to the site when it is built, so that none of them can be out of date.
"""

import pkgutil
import re
from collections.abc import Iterable, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Any

import specdistill
from specdistill.cli.command import COMMON_ARGUMENTS
from specdistill.cli.main import VERBS
from specdistill.common.documents import read_json
from specdistill.methods import METHODS
from specdistill.recipe.fields import HelpRow, describe

SCHEMA_OF_RECIPES = "methods.recipe:Recipe"
# The pages of commands: file -> title and verbs.
COMMAND_PAGES = {
    "train.md": ("Commands to plan and train", ("plan", "demo", "acquire", "data", "train")),
    "measure.md": (
        "Commands to measure and judge",
        ("eval", "compare", "gate", "table", "doctor"),
    ),
    "serve.md": ("Commands to serve and publish", ("export", "publish", "monitor")),
}
REPORT_SCHEMA = Path("specdistill", "evaluation", "report", "report.schema.json")


def build_reference(root: Path) -> dict[str, str]:
    """Return the Markdown of every page of the reference, by its path below docs/.

    Args:
        root: the root of the repository.
    """
    pages = {
        f"reference/{name}": format_commands(title, verbs)
        for name, (title, verbs) in COMMAND_PAGES.items()
    }
    schema = read_json(root / REPORT_SCHEMA)
    pages["reference/recipe.md"] = format_recipe()
    pages["reference/python.md"] = format_python()
    pages["reference/report-schema.md"] = format_report_schema(schema)
    return pages


def format_commands(title: str, verbs: Sequence[str]) -> str:
    """Return a page with the purpose, the examples and the keys of some commands."""
    arguments = [(f"`{name}`", escape(meaning)) for name, meaning in COMMON_ARGUMENTS.items()]
    common = format_table(("argument", "meaning"), arguments)
    sections = [f"# {title}", "Every command takes these arguments, too:", common]
    for verb in verbs:
        row = VERBS[verb]
        purpose, _, examples = cleandoc(row.run.__doc__ or "").partition("\n\n")
        sections += [f"## specdistill {verb}", purpose]
        if examples:
            sections.append(f"```bash\n{examples}\n```")
        if row.shorthands:
            short_keys = [f"`{short}` for `{key}`" for short, key in row.shorthands.items()]
            sections.append(f"Short keys: {', '.join(short_keys)}.")

        # The keys of recipes have a page of their own.
        schemas = row.schemas.split()
        if SCHEMA_OF_RECIPES in schemas:
            schemas.remove(SCHEMA_OF_RECIPES)
            sections.append("It takes all [keys of a recipe](recipe.md).")
        rows: list[HelpRow] = []
        for schema in schemas:
            rows += describe(pkgutil.resolve_name(f"specdistill.{schema}"))
        if rows:
            sections.append(format_keys(rows))
    return "\n\n".join(sections)


def format_recipe() -> str:
    """Return the page with every key of a recipe, one table for each section of the recipe."""
    sections = [
        "# Recipe keys",
        "Every key of a recipe, of all methods. If only some methods have a key, its meaning begins"
        " with their names. The [commands](train.md) take the same keys as arguments.",
    ]
    trained_methods = ", ".join(name for name, row in METHODS.items() if row.is_trained)
    groups: dict[str, list[HelpRow]] = {}
    for row in describe(pkgutil.resolve_name(f"specdistill.{SCHEMA_OF_RECIPES}")):
        section, dot, _ = row.key.partition(".")
        meaning = row.help.replace(f"{trained_methods}: ", "methods that are trained: ")
        groups.setdefault(section if dot else "", []).append(row._replace(help=meaning))
    for name, rows in groups.items():
        heading = f"## {name}" if name else "## Without a section"
        sections += [heading, format_keys(rows)]
    return "\n\n".join(sections)


def format_python() -> str:
    """Return the page of the Python API, whose entries mkdocstrings writes from the docstrings."""
    names = "\n\n".join(f"::: specdistill.api.{name}" for name in sorted(specdistill.__all__))
    return (
        "# Python API\n\nThe names that `import specdistill` provides."
        f" [From Python](../python.md) shows how to use them.\n\n{names}"
    )


def format_report_schema(schema: Mapping[str, Any]) -> str:
    """Return the page with every field of report.json, one table for each kind of object."""
    sections = [
        "# Fields of report.json",
        "[Reading a report](../report.md) explains the most important fields.",
    ]
    for name, definition in {"report.json": schema, **schema["$defs"]}.items():
        required = definition.get("required", [])
        rows = [
            (
                f"`{field}`" if field in required else f"`{field}` (optional)",
                format_schema_type(rule),
                escape(rule.get("description", "")),
            )
            for field, rule in definition.get("properties", {}).items()
        ]
        title = name.removesuffix("Document")
        sections += [f"## {title}", escape(definition.get("description", ""))]
        sections.append(format_table(("field", "type", "meaning"), rows))
    return "\n\n".join(sections)


def format_schema_type(rule: Mapping[str, Any]) -> str:
    """Return the type of a field of a JSON Schema in words, with links to other objects."""
    if "$ref" in rule:
        title = rule["$ref"].rpartition("/")[2].removesuffix("Document")
        return f"[{title}](#{title.lower()})"
    if "anyOf" in rule:
        return " or ".join(format_schema_type(choice) for choice in rule["anyOf"])
    if "const" in rule:
        return f"`{rule['const']}`"
    if "enum" in rule:
        return " or ".join(f"`{value}`" for value in rule["enum"])
    if rule.get("type") == "array" and "items" in rule:
        return f"list of {format_schema_type(rule['items'])}"
    return str(rule.get("type", "any"))


def format_keys(rows: Iterable[HelpRow]) -> str:
    """Return a table of keys with their type, default and meaning."""
    cells = []
    for row in rows:
        # The default "null" only means that the key need not be set.
        default = "" if row.default == "null" else f"`{row.default}`"
        if row.default == "required":
            default = "required"
        kind = escape(row.kind.replace(" or null", "").replace("|", " | "))
        cells.append((f"`{row.key}`", kind, default, escape(row.help)))
    return format_table(("key", "type", "default", "meaning"), cells)


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. A cell's code may hold `|`, other text has to be escaped before."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escape(text: str) -> str:
    """Return a text as Markdown that shows it unchanged; code between backticks stays code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([\\*_\[\]<>|{}])", r"\\\1", part)
        for part in parts
    )
