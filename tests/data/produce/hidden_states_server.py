"""A server that answers as vLLM 0.32 does with ExampleHiddenStatesConnector, with the hidden states
of a target in this process."""

import fcntl
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specdistill.targets.frozen import FrozenTarget
from tests.data.produce import openai_server
from tests.data.produce.openai_server import Behaviour, completion

ONE_PASS = threading.Lock()  # servers may share a target, whose hooks serve one pass at a time


@contextmanager
def serve_hidden_states(
    target: FrozenTarget,
    layers: Sequence[int],
    folder: Path | None,
    *,
    dtype: Any = None,
    includes_output: bool = True,
) -> Iterator[str]:
    """Run a server of hidden states and yield its address.

    Args:
        target: the target that computes the hidden states.
        layers: the layers whose hidden states are written.
        folder: the folder to write hidden states to; None is a server without the connector.
        dtype: the dtype of the hidden states.
        includes_output: whether generated tokens have hidden states, too, if a request asks for
            them.
    """
    numbers = itertools.count()

    def write_states(body: dict[str, Any]) -> dict[str, Any]:
        is_asked = body.get("kv_transfer_params") == {"include_output_tokens": True}
        assert body["model"] == "served" and (is_asked or body["max_tokens"] == 1)
        if folder is None:
            return {}
        ids = body["prompt"]
        if is_asked and includes_output:
            answer, _ = completion(ids, body["seed"], body["temperature"], Behaviour().text)
            ids = [*ids, *answer[: body["max_tokens"]]][:-1]
        with ONE_PASS:
            aux = target.features(torch.tensor([ids]), layers).aux
        hidden = torch.stack([feature[0] for feature in aux], dim=1)
        path = folder / f"cmpl-{next(numbers)}.safetensors"
        lock = path.with_name(f"{path.name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)

        def save_later() -> None:
            time.sleep(0.02)
            save_file(
                {"hidden_states": hidden.to(dtype or hidden.dtype), "token_ids": torch.tensor(ids)},
                path,
            )
            lock.close()

        threading.Thread(target=save_later).start()
        return {"kv_transfer_params": {"hidden_states_path": str(path)}}

    with openai_server.running(Behaviour(models=("served",), more=write_states)) as server:
        yield server.address
