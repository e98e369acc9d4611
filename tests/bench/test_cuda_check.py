"""The kernels and waits that bench/cuda_check.py counts, here of operations on a CPU.

A new record needs the CUDA build of torch (make cuda-check).
"""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from tests.scripts import load_script

cuda_check: Any = load_script("bench/cuda_check.py")


def test_operations_that_write_count_as_kernels_and_data_dependent_ones_as_waits():
    with FakeTensorMode():
        x, mask = torch.empty(4, 8), torch.empty(4, dtype=torch.bool)
        with cuda_check.LaunchLedger("cpu") as ledger:
            _ = (x + 1).t().reshape(8, 4)[:2] @ x  # a sum, views, and a product
            x.mul_(2)
            torch.empty_like(x)
        assert (ledger.kernels, ledger.waits) == (3, 0)
        with cuda_check.LaunchLedger("cpu") as ledger:
            x[mask]
        assert cuda_check.format_counts(ledger)["waits"] == 1


def test_the_record_of_training_has_no_waits():
    record = json.loads(cuda_check.RECORD.read_text())
    assert {
        name: counts["waits"]
        for name, counts in record.items()
        if name.startswith("training") and counts["waits"]
    } == {}
    assert len(record) == 10


def test_a_target_without_weights_is_on_the_device_of_its_tensors() -> None:
    """Rows are moved to the target's device, not to that of the small target it was tried with."""
    target = cuda_check.TARGET.weightless
    assert target.device == target.lm_head.weight.device == torch.device("meta")


@pytest.mark.long  # passes of an 8B target's width, operation by operation
# a tensor without content has no data pointer
@pytest.mark.filterwarnings("ignore:Accessing the data pointer:UserWarning")
def test_every_part_of_decoding_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check without a GPU that the library still has everything that the CUDA count calls."""
    config = LlamaConfig.from_dict({**cuda_check.TARGET.config.to_dict(), "num_hidden_layers": 6})
    monkeypatch.setattr(cuda_check, "TARGET", replace(cuda_check.TARGET, config=config))
    monkeypatch.setitem(cuda_check.DRAFT_MODEL, "num_hidden_layers", 1)
    monkeypatch.setattr(cuda_check, "DEVICE", "cpu")
    row = {
        "input_ids": [0] * 64,
        "loss_mask": [1] * 64,
        "document_ids": [0] * 64,
        "position_ids": list(range(64)),
    }
    batch = cuda_check.collate([row])
    head = cuda_check.plan_head()
    with FakeTensorMode() as mode:
        for name, part in cuda_check.build_parts(head, batch, mode).items():
            if name.startswith("decoding"):
                with cuda_check.LaunchLedger("cpu") as ledger:
                    part()
                assert ledger.kernels > 50, name
