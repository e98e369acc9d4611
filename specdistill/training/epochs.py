"""Rows for several processes: as many full batches for each of them, and every row read once in an epoch.

Where a set does not divide, accelerate gives rows twice, and an evaluation would count them twice. Here rows without tokens stand in.
"""

from collections.abc import Iterator

from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset, concatenate_datasets
from torch.utils.data import Sampler

from specdistill.rows.packing import PADDING_DOCUMENT


def fill_up(rows: Dataset, multiple: int) -> Dataset:
    """The rows, and after them as many empty ones as make their number a multiple: all padding, without loss."""
    length, missing = len(rows[0]["input_ids"]), -len(rows) % multiple
    empty = {"input_ids": 0, "loss_mask": 0, "document_ids": PADDING_DOCUMENT, "position_ids": 0}
    table = {column: [[value] * length] * missing for column, value in empty.items()}
    return concatenate_datasets([rows, Dataset.from_dict(table, features=rows.features)]) if missing else rows


class RandomOrder(Sampler[int]):
    """Indices of an epoch: of the rows, in an order that follows from seed and epoch alone, then of the empty rows.

    So the order is the same for any number of processes, although the number of empty rows is not.
    """

    def __init__(self, num_rows: int, num_empty: int, seed: int) -> None:
        self.rows = SeedableRandomSampler(range(num_rows), data_seed=seed)
        self.empty = range(num_rows, num_rows + num_empty)

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        yield from self.rows
        yield from self.empty

    def __len__(self) -> int:
        return len(self.rows) + len(self.empty)
