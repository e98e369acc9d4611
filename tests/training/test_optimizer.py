import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from specdistill.training.arguments import build_training_arguments
from specdistill.training.optimizer import MuonAdamW, build_optimizer, count_flops, divide
from tests.processes import run_processes
from tests.refusals import refused


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 6)
        self.hidden = nn.Linear(6, 8, bias=True)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.lm_head = nn.Linear(8, 7, bias=False)

    def loss(self) -> torch.Tensor:
        return (
            self.lm_head(self.frozen(self.hidden(self.embed(torch.arange(7)))).tanh())
            .square()
            .mean()
        )


def take_step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model.loss().backward()
    optimizer.step()


def test_hidden_matrices_go_to_muon_and_the_rest_to_adamw() -> None:
    model = Model()
    optimizer = MuonAdamW(model, lr=0.1)
    muon, adamw = (
        [p for group in part.param_groups for p in group["params"]]
        for part in optimizer.parts.values()
    )
    assert [id(p) for p in muon] == [id(model.hidden.weight)]
    assert {id(p) for p in adamw} == {
        id(model.embed.weight),
        id(model.hidden.bias),
        id(model.lm_head.weight),
    }


def test_each_part_takes_torchs_own_step() -> None:
    ours, theirs = Model(), Model()
    optimizer = MuonAdamW(ours, lr=0.1, weight_decay=0.01)
    muon = torch.optim.Muon(
        [theirs.hidden.weight], lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )
    others = [theirs.embed.weight, theirs.hidden.bias, theirs.lm_head.weight]
    adamw = torch.optim.AdamW(others, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for _ in range(3):
        take_step(ours, optimizer)
        theirs.zero_grad()
        theirs.loss().backward()
        muon.step()
        adamw.step()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, dict(theirs.named_parameters())[name]), name


def test_a_schedule_moves_both_parts() -> None:
    model = Model()
    optimizer = MuonAdamW(model, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5**done)
    take_step(model, optimizer)
    # Loading gives the parts new groups, whose rates the schedule has to move.
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    schedule.step()
    assert {group["lr"] for part in optimizer.parts.values() for group in part.param_groups} == {
        0.05
    }


def test_muon_is_refused_where_parameters_are_shards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    arguments = build_training_arguments({"output_dir": str(tmp_path)})
    assert build_optimizer("adamw", Model(), arguments) is None
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with refused("optimizer", "muon_adamw"):
        build_optimizer("muon_adamw", Model(), arguments)


def test_an_optimizer_that_is_not_installed_is_refused(tmp_path: object) -> None:
    arguments = build_training_arguments({"output_dir": str(tmp_path), "optim": "galore_adamw"})
    with refused("train.optim"):
        build_optimizer("adamw", Model(), arguments)


def test_a_part_without_parameters_is_left_out():
    only_matrices = torch.nn.Linear(4, 4, bias=False)
    optimizer = MuonAdamW(only_matrices, lr=0.1)
    before = only_matrices.weight.detach().clone()
    only_matrices(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(only_matrices.weight, before)
    assert set(optimizer.state_dict()) == {"muon"}
    optimizer.load_state_dict(optimizer.state_dict())


# The matrices of a one-layer EAGLE-3 head for Llama-3.1-8B: fc, q, k, v, o, gate, up, down.
HEAD = [
    (4096, 12288),
    (4096, 8192),
    (1024, 8192),
    (1024, 8192),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
]


@pytest.mark.parametrize(("num_processes", "busiest"), [(1, 1.0), (2, 0.52), (4, 0.31), (64, 0.21)])
def test_the_matrices_of_a_head_are_divided_evenly(num_processes: int, busiest: float) -> None:
    """`busiest` is the largest share of the work; the largest matrix alone is 0.202 of it."""
    matrices = [torch.empty(shape, device="meta") for shape in HEAD]
    shares = divide(matrices, num_processes)
    assert sorted(id(matrix) for share in shares for matrix in share) == sorted(map(id, matrices))
    assert len(shares) == num_processes
    assert max(sum(map(count_flops, share)) for share in shares) <= busiest * sum(
        map(count_flops, matrices)
    )


@pytest.mark.parametrize("shape", [(6, 8), (8, 6)])
def test_the_cost_of_a_matrix_equals_the_count_of_torch(shape: tuple[int, int]) -> None:
    matrix = nn.Parameter(torch.ones(shape))
    matrix.grad = torch.ones(shape)
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon([matrix], ns_steps=5).step()
    assert counter.get_total_flops() == 5 * count_flops(matrix)


def build_matrices() -> nn.Module:
    """Return a model of wide, tall and square matrices; `take_steps` sets their gradients."""
    torch.manual_seed(0)
    shapes = [(24, 40), (40, 24), (16, 16), (6, 48), (32, 8)]
    return nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, *numbers: int) -> int:
    """Take a step with the gradients of each number, and return the floating-point operations of
    this process."""
    with FlopCounterMode(display=False) as counter:
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    return counter.get_total_flops()


@pytest.mark.distributed
def test_two_processes_share_the_work_of_one_and_one_resumes_what_they_saved(
    tmp_path: Path,
) -> None:
    alone = build_matrices()
    theirs = torch.optim.Muon(
        alone.parameters(), lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )
    work = take_steps(alone, theirs, 0, 1, 2)

    def take_three_steps(rank: int) -> None:
        model = build_matrices()
        optimizer = MuonAdamW(model, lr=0.1, weight_decay=0.01)
        done = take_steps(model, optimizer, 0, 1)
        checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        done += take_steps(model, optimizer, 2)
        torch.save((done, model.state_dict(), checkpoint), tmp_path / f"{rank}.pt")

    ended = run_processes(tmp_path, take_three_steps, 0, 1)
    assert [process.code for process in ended] == [0, 0], ended
    shared = []
    for rank in range(2):
        done, weights, (saved, state) = torch.load(tmp_path / f"{rank}.pt")
        resumed = build_matrices()
        resumed.load_state_dict(saved)
        optimizer = MuonAdamW(resumed, lr=0.1, weight_decay=0.01)
        optimizer.load_state_dict(state)
        assert take_steps(resumed, optimizer, 2) == work / 3
        for name, expected in alone.state_dict().items():
            assert torch.equal(weights[name], expected) and torch.equal(
                resumed.state_dict()[name], expected
            ), name
        shared.append(done)
    assert sum(shared) == work and max(shared) < 0.6 * work
