"""Where the files beside the library are: recipes, launch configurations, suites, gates, metric modules and the scripts themselves.

In a checkout they stand at the repository's root; a wheel carries them under `specdistill/_project`.
"""

import subprocess
from pathlib import Path

_PACKAGE = Path(__file__).parent
ROOT = _PACKAGE / "_project" if (_PACKAGE / "_project").is_dir() else _PACKAGE.parent
RECIPES = ROOT / "recipes"
LAUNCHES = ROOT / "accelerate_configs"
SUITES = ROOT / "eval" / "suites"
GATES = ROOT / "eval" / "gates"
METRICS = ROOT / "eval" / "metrics"
PICO = _PACKAGE / "assets" / "pico"


def git_revision() -> str | None:
    """The checkout's commit, with `-dirty` for uncommitted changes; None outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
