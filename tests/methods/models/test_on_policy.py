"""Batches that the draft generates keep the beginning of each row, which has no loss."""

import pytest
import torch

from specdistill.methods.models.objective import OnPolicyGeneration
from tests.refusals import refused
from tests.tiny import tiny_target_model


def make_batch() -> dict[str, torch.Tensor]:
    """Return three rows; the second begins with a document too short to be continued."""
    ids = torch.randint(3, 200, (3, 20), generator=torch.Generator().manual_seed(1))
    documents = torch.zeros_like(ids)
    documents[1, 4:] = 1
    return {
        "input_ids": ids,
        "loss_mask": torch.ones_like(ids),
        "document_ids": documents,
        "position_ids": torch.arange(20).repeat(3, 1),
    }


def build_generation(
    fraction: float = 1.0, temperature: float = 0.0, end_ids: tuple[int, ...] = ()
) -> OnPolicyGeneration:
    return OnPolicyGeneration(
        tiny_target_model(num_layers=1), fraction, temperature, 6, 10, end_ids, seed=0
    )


def test_rows_are_beginnings_that_the_draft_continues() -> None:
    rows, student = make_batch(), build_generation()
    generated = student(rows, 0)
    kept = rows["input_ids"][[0, 2], :6]
    expected = student.draft.generate(
        kept,
        attention_mask=torch.ones_like(kept),
        do_sample=False,
        max_new_tokens=10,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert torch.equal(generated["input_ids"], expected)
    assert generated["loss_mask"].tolist() == [[0] * 6 + [1] * 10] * 2
    assert generated["document_ids"].eq(0).all()
    assert generated["position_ids"].tolist() == [list(range(16))] * 2


@pytest.mark.parametrize(
    ("launch", "whole"),
    [({"DEEPSPEED": "2"}, True), ({"DEEPSPEED": "3"}, False), ({"FSDP": ""}, False), ({}, True)],
)
def test_a_draft_with_sharded_weights_does_not_generate(
    launch: dict[str, str], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch tells its processes in the environment that weights are sharded."""
    for sharding, stage in launch.items():
        monkeypatch.setenv(f"ACCELERATE_USE_{sharding}", "true")
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage)
    build_generation(fraction=0.0)
    if whole:
        build_generation(fraction=0.5)
    else:
        with refused("on_policy.fraction", "0.5 with sharded weights"):
            build_generation(fraction=0.5)


def test_a_text_that_ends_early_is_padded() -> None:
    student = build_generation()
    free = student(make_batch(), 0)["input_ids"][:, 6:]
    stop = next(int(token) for token in free[0, 2:6] if token not in free[1])
    ended = OnPolicyGeneration(student.draft, 1.0, 0.0, 6, 10, (stop,), seed=0)(make_batch(), 0)
    length = free[0].tolist().index(stop) + 1
    assert ended["loss_mask"][0].sum() == length
    assert ended["document_ids"][0].tolist() == [0] * (6 + length) + [-1] * (10 - length)


def test_the_fraction_of_generated_batches_repeats_with_the_seed() -> None:
    student, rows = build_generation(fraction=0.3, temperature=1.0), make_batch()
    replaced = [student(rows, number) is not rows for number in range(60)]
    assert replaced == [student(rows, number) is not rows for number in range(60)]
    assert 8 <= sum(replaced) <= 30
    assert build_generation(fraction=0.0)(rows, 0) is rows
    one, other = [number for number, is_replaced in enumerate(replaced) if is_replaced][:2]
    assert torch.equal(student(rows, one)["input_ids"], student(rows, one)["input_ids"])
    assert not torch.equal(student(rows, one)["input_ids"], student(rows, other)["input_ids"])


def test_rows_without_a_long_enough_beginning_are_left_as_they_are() -> None:
    rows = {name: values[1:2] for name, values in make_batch().items()}
    assert build_generation()(rows, 0) is rows
