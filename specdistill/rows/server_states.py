"""Files of hidden states that a vLLM server writes (0.32, started as docs/data.md says), of prompts or of what it generates, too.

An answer names a safetensors file of `hidden_states` [L, layers, D] and `token_ids` [L] of the prompt; after a request with OF_OUTPUT, of
prompt and completion, but its last token, which the target has not read. The server holds a lock on a file next to it until it is whole.

Those of completions wait in a folder, each under a hash of its tokens, for the rows that their documents will be in.
"""

import fcntl
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdistill.engines.server import POLL_SECONDS, Server
from specdistill.errors import ResourceError
from specdistill.rows.files import on_disk

OF_OUTPUT = {"kv_transfer_params": {"include_output_tokens": True}}


def waiting(folder: Path, ids: Sequence[int]) -> Path:
    """The place of the file of these tokens."""
    return folder / f"{xxhash.xxh3_128_hexdigest(np.asarray(ids, np.int32).tobytes())}.safetensors"


def take(
    path: Path,
    ids: list[int],
    server: Server,
    folder: Path | None = None,
    prompt: Sequence[int] = (),
) -> Tensor:
    """The hidden states [L, layers, D] that a server has written for these tokens; its files are removed, and no others.

    folder: where the file waits instead, but one of the prompt is removed, too: the server does not know OF_OUTPUT.
    """
    try:
        lock = path.with_name(f"{path.name}.lock")
        if lock.exists() and not lock.is_file():  # to open a pipe waits for who writes
            raise ValueError(f"{lock}, which is no file")
        with lock.open() as held:
            deadline = time.monotonic() + server.timeout
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break  # the file is whole
                if server.is_closed or time.monotonic() > deadline:
                    what = f"{server.address} did not write {path} in {server.timeout:g} s"
                    raise ResourceError(
                        what, next_step=f"look at its log, or raise {server.timeout_key}"
                    )
                time.sleep(POLL_SECONDS)
            tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        what = f"{server.address} wrote no hidden states that this machine can read ({error})"
        next_step = (
            "start it with ExampleHiddenStatesConnector and a folder that both see (docs/data.md)"
        )
        raise ResourceError(what, next_step=next_step) from error
    found = tensors["token_ids"].tolist() if set(tensors) == {"hidden_states", "token_ids"} else []
    if not found or found not in (ids, prompt):
        what = f"{server.address} names {path}, which are not the hidden states of its prompt"
        raise ResourceError(what, next_step="look at its log")
    if folder and found == ids:
        moved = (
            folder / f"{path.name}.part"
        )  # of its own: several requests may give the same tokens
        with on_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.move(path, moved)  # copied, from another disk
            moved.replace(waiting(folder, ids))
    else:
        path.unlink()
    lock.unlink()
    return tensors["hidden_states"]
