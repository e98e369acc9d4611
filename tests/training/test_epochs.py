from datasets import Dataset

from specdistill.data.rows.packing import COLUMNS
from specdistill.training.trainer import RandomOrder, fill_up


def make_numbered_rows(count: int) -> Dataset:
    return Dataset.from_list(
        [{column: [index, index] for column in COLUMNS} for index in range(count)]
    )


def test_empty_rows_fill_up_the_number_to_a_multiple_and_carry_nothing():
    filled = fill_up(make_numbered_rows(5), 4)
    assert len(filled) == 8 and filled[:5] == make_numbered_rows(5)[:]
    assert filled[7] == {
        "input_ids": [0, 0],
        "loss_mask": [0, 0],
        "document_ids": [-1, -1],
        "position_ids": [0, 0],
    }
    assert fill_up(make_numbered_rows(8), 4)[:] == make_numbered_rows(8)[:]


def test_the_order_follows_from_seed_and_epoch_whatever_is_filled_up():
    def list_epoch(number: int, *, num_empty: int = 0, seed: int = 3) -> list[int]:
        order = RandomOrder(50, num_empty, seed)
        order.set_epoch(number)
        assert len(order) == 50 + num_empty
        return list(order)

    assert sorted(list_epoch(0)) == list(range(50))
    assert list_epoch(1, num_empty=6) == [*list_epoch(1), *range(50, 56)]
    assert len({tuple(list_epoch(0)), tuple(list_epoch(1)), tuple(list_epoch(0, seed=9))}) == 3
