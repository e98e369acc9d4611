"""The paths of the files that ship with specdistill besides its code.

These files are recipes, launch configurations, suites, gates, metric modules and scripts. In a
checkout they are at the root of the repository. In an installed wheel they are below
`specdistill/_project`.
"""

import subprocess
from pathlib import Path

from specdistill.common.errors import UserError, find_nearest

_PACKAGE = Path(__file__).parent.parent
ROOT = _PACKAGE / "_project" if (_PACKAGE / "_project").is_dir() else _PACKAGE.parent
RECIPES = ROOT / "recipes"
LAUNCHES = ROOT / "accelerate_configs"
SUITES = ROOT / "eval" / "suites"
GATES = ROOT / "eval" / "gates"
PUBLISHED_FOLDER = ROOT / "eval" / "published"
ANSWERS = ROOT / "eval" / "metrics" / "answers"
PICO = _PACKAGE / "targets" / "pico"


def find_yaml(name: str, folder: Path, key: str) -> Path:
    """Find a YAML file by its path, or by its name in a folder of files that ship with specdistill.

    Args:
        name: a path, or a name without `.yaml`, such as `pico/eagle3`.
        folder: the folder of the files, such as RECIPES.
        key: the key that the error names.

    Raises:
        UserError: if neither exists.
    """
    # A path comes first, so that a file of the user wins over a file in `folder` of that name.
    for candidate in (Path(name), folder / f"{name}.yaml"):
        if candidate.is_file():
            return candidate

    # Name all files of the folder in the error, and the one with the most similar name.
    known_names = sorted(
        path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")
    )
    raise UserError(
        key,
        got=repr(name),
        expected=f"a YAML file, or a name under {folder.name}/ ({', '.join(known_names)})",
        nearest=find_nearest(name, known_names),
    )


def read_git_revision() -> str | None:
    """Return the git commit of the code that runs, with `-dirty` if it has uncommitted changes.

    Returns:
        The commit; None if specdistill does not run from a git checkout, or if git is missing.
    """
    try:
        # --always prints the hash of the commit if there is no tag, and --exclude=* ignores all
        # tags. So the result is always the full hash (40 digits).
        return subprocess.run(
            ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
