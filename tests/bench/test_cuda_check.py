"""What is counted of a GPU's work, counted of a CPU's; the record itself takes the CUDA build of torch (make cuda-check)."""

import json
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.scripts import load_script

cuda_check: Any = load_script("bench/cuda_check.py")


def test_operations_that_write_are_kernels_and_what_depends_on_data_is_waited_for():
    with FakeTensorMode():
        x, mask = torch.empty(4, 8), torch.empty(4, dtype=torch.bool)
        with cuda_check.Launches("cpu") as ledger:
            _ = (x + 1).t().reshape(8, 4)[:2] @ x  # a sum, views, and a product
            x.mul_(2)
            torch.empty_like(x)
        assert (ledger.kernels, ledger.copies) == (3, 0)
        with cuda_check.Launches("cpu") as ledger:
            x[mask]
        assert cuda_check.counted(ledger)["waits"] == 1


def test_nothing_is_waited_for_in_the_record_of_training():
    record = json.loads(cuda_check.RECORD.read_text())
    assert {
        name: counts["waits"]
        for name, counts in record.items()
        if name.startswith("training") and counts["waits"]
    } == {}
    assert len(record) == 10
