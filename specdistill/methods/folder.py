"""A folder that is there whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from specdistill.errors import ResourceError, UserError


def check_new(output: Path) -> None:
    """Raises UserError when something stands in the place of a new folder."""
    if output.exists():
        raise UserError("output_dir", got=f"{output}, which exists", expected="a new folder")


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder to write in, which takes its name once all is written; nothing is left behind otherwise.

    Raises UserError when the output exists, ResourceError when writing fails.
    """
    check_new(output)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(output)
    except (OSError, SafetensorError) as error:
        what = f"output_dir: could not write {output} ({error})"
        raise ResourceError(what, next_step="check space and permissions") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def link(source: Path, link: Path) -> None:
    """A hard link to the file itself (the Hub's cache holds symbolic links), or a copy where there can be none."""
    try:
        os.link(source.resolve(), link)
    except OSError:
        shutil.copy2(source, link)
