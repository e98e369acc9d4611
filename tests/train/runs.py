"""`specdistill train` as a user types it, in this process: two steps for a tiny target."""

import subprocess
from pathlib import Path

from tests.scripts import specdistill
from tests.tiny import SMALL, input_keys


def train(folder: Path, output: Path, *keys: str) -> subprocess.CompletedProcess[str]:
    """Train on the inputs that `tests.tiny.write_inputs` wrote to a folder.

    A recipe among the keys comes first, so that the small settings override its own.
    """
    recipe = [key for key in keys if key.startswith("recipe=")]
    draft_keys = (
        ["draft.num_layers=2"]
        if {"method=draft_model", "method=pard"} & {*keys}
        else ["draft.ttt_steps=3"]
    )
    other_keys = [key for key in keys if key not in recipe]
    return specdistill(
        "train",
        *recipe,
        *input_keys(folder),
        *draft_keys,
        *SMALL,
        f"train.output_dir={output}",
        *other_keys,
    )
