"""Where the files that ship with the library are: recipes, launch configurations, suites, gates, metric modules and the scripts.

In a checkout they are at the repository's root; a wheel carries them under `specdistill/_project`.
"""

import subprocess
from pathlib import Path

from specdistill.errors import UserError, nearest

_PACKAGE = Path(__file__).parent
ROOT = _PACKAGE / "_project" if (_PACKAGE / "_project").is_dir() else _PACKAGE.parent
RECIPES = ROOT / "recipes"
LAUNCHES = ROOT / "accelerate_configs"
SUITES = ROOT / "eval" / "suites"
GATES = ROOT / "eval" / "gates"
PUBLISHED = ROOT / "eval" / "published"
ANSWERS = ROOT / "eval" / "metrics" / "answers"
PICO = _PACKAGE / "assets" / "pico"


def find_yaml(name: str, folder: Path, key: str) -> Path:
    """A YAML file: the path itself, or a name under `folder` without the ending. Raises UserError, naming `key`, where neither exists."""
    for candidate in (Path(name), folder / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    known = sorted(
        path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")
    )
    expected = f"a YAML file, or a name under {folder.name}/ ({', '.join(known)})"
    raise UserError(key, got=repr(name), expected=expected, nearest=nearest(name, known))


def git_revision() -> str | None:
    """The checkout's commit, with `-dirty` for uncommitted changes; None outside a checkout."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
