"""Features from vLLM servers of the target, which write the hidden states of every prompt to a folder (vLLM 0.32).

vllm serve TARGET --no-enable-prefix-caching \\
  --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config":
    {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 8, 13, 16]}}}' \\
  --kv-transfer-config '{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
    "kv_connector_extra_config": {"shared_storage_path": "/a/folder"}}'

The layers are those that the draft reads, and the last one, 16 of 16 here. vLLM counts them as we do, passes them on in ascending order,
and takes the last before the target's final norm, which is applied here. The answer to a request for one token names a safetensors file of
`hidden_states` [L, layers, D] and `token_ids` [L]; the server holds a lock on a file beside it until it is whole.

Shapes: L tokens of a document, A auxiliary layers, D target hidden size.
"""

import fcntl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdistill.engines.server import Server
from specdistill.errors import ResourceError, UserError
from specdistill.rows.shard import Tokens
from specdistill.targets.frozen import FrozenTarget

KEY = "hidden_states.server"

Rows = Sequence[dict[str, Any]]  # with the columns of specdistill.rows.packing
Make = Callable[[Rows], Sequence[Tensor]]  # rows -> the features [A + 1, L, D] of each


def by_servers(target: FrozenTarget, aux_layers: Sequence[int], addresses: Sequence[str], timeout: float) -> Make:
    """Passes of servers, which take the documents by turns. timeout: seconds that an answer may take.

    Raises UserError for servers of other layers or another dtype, ResourceError when one fails.
    """
    servers = [Server(address, key=KEY, timeout=timeout, timeout_key="hidden_states.timeout") for address in addresses]
    models = [server.json("/v1/models")["data"][0]["id"] for server in servers]
    layers = sorted({*aux_layers, target.num_layers})
    wanted = [layers.index(layer) for layer in (*aux_layers, target.num_layers)]

    def states(number: int, ids: list[int]) -> Tensor:
        """[A + 1, L, D] of a document, the last one normed."""
        index = number % len(servers)
        body = {"model": models[index], "prompt": ids, "max_tokens": 1, "temperature": 0}
        answer = servers[index].json("/v1/completions", body)
        written = Path((answer.get("kv_transfer_params") or {}).get("hidden_states_path") or "")
        hidden_LND = _read(written, ids, servers[index].address)
        if hidden_LND.shape[1:] != (len(layers), target.hidden_size) or str(hidden_LND.dtype) != f"torch.{target.dtype}":
            got = f"{servers[index].address}, which writes {list(hidden_LND.shape[1:])} {hidden_LND.dtype} for each token"
            raise UserError(KEY, got=got, expected=f"layers {layers} of {target.hidden_size} in {target.dtype}")
        features_ALD = hidden_LND[:, wanted].transpose(0, 1).contiguous()
        with torch.no_grad():
            features_ALD[-1] = target.norm(features_ALD[-1].to(target.device)).cpu()
        return features_ALD

    def make(rows: Rows) -> list[Tensor]:
        tokens = [Tokens.of(row) for row in rows]
        split = [torch.from_numpy(row.input_ids).split(row.document_lengths.tolist()) for row in tokens]
        documents = [ids.tolist() for row in split for ids in row]
        with ThreadPoolExecutor(len(documents)) as pool:
            found = iter(list(pool.map(states, range(len(documents)), documents)))
        return [torch.cat([next(found) for _ in row], dim=1) for row in split]

    return make


def _read(path: Path, ids: list[int], server: str) -> Tensor:
    """The hidden states [L, layers, D] that a server has written for a prompt; its files are removed."""
    try:
        lock = path.with_name(f"{path.name}.lock")
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_SH)  # until the file is whole
            tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        what = f"{server} wrote no hidden states that this machine can read ({error})"
        next_step = "start it with ExampleHiddenStatesConnector and a folder that both see (docs/data.md)"
        raise ResourceError(what, next_step=next_step) from error
    path.unlink()
    lock.unlink()
    if tensors["token_ids"].tolist() != ids:
        raise ResourceError(f"{server} wrote the hidden states of another prompt to {path}", next_step="look at its log")
    return tensors["hidden_states"]
