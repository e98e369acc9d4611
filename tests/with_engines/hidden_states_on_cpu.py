"""vLLM's ExampleHiddenStatesConnector without a GPU.

The original copies through CUDA streams and pinned memory, which a CPU does not have.

All else is vLLM's: what is extracted from its cache, the files, their locks, and what the server
answers.
"""

from types import SimpleNamespace

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as vllm


class HiddenStatesOnCpu(vllm.ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: vllm.PendingSave) -> None:
        offsets = torch.arange(self._block_size)
        slots = (
            torch.tensor(pending.block_ids).unsqueeze(1) * self._block_size + offsets
        ).flatten()
        hidden = vllm.extract_from_kv_cache(
            self._kv_cache, slots, len(pending.token_ids)
        ).contiguous()
        tensors = {"hidden_states": hidden, "token_ids": pending.token_ids.clone()}
        done = SimpleNamespace(synchronize=lambda: None, query=lambda: True)
        self._req_copy_events[pending.req_id] = done
        self._write_tensors(
            tensors, done, pending.filename, self._lock_fds.pop(pending.req_id, None)
        )
