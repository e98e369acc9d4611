"""The unroll's attention against torch's over all keys at once, masked; its memory; and that it is
one graph that asks for no data."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from specdistill.methods.chains.objective import UnrollKVCache
from specdistill.targets import packed_attention

K = 7
ROWS, LENGTH = 2, 20
# Two rows: documents of 1, 12 and 7 tokens; of 20. Empty ones stand between, and at the end, as
# padding does.
CUMULATIVE = torch.tensor([0, 1, 13, 13, 20, 40, 40, 40], dtype=torch.int32)
WINDOWS = [None, 7, 9, 12, 40]
SHAPES = {
    "one head each": (4, 4, 16, 16),
    "grouped": (4, 2, 16, 16),
    "other values": (6, 2, 12, 8),
    "wide values": (2, 2, 8, 12),
}


def noise(
    shape: tuple[int, int, int, int], steps: int = K, length: int = LENGTH, rows: int = ROWS
) -> list[list[Tensor]]:
    """Query, key and value of each step, laid out as projections leave them."""
    heads, groups, size, value_size = shape
    generator = torch.Generator().manual_seed(0)
    parts = [(heads, size), (groups, size), (groups, value_size)]
    return [
        [torch.randn(rows, length, *part, generator=generator).transpose(1, 2) for part in parts]
        for _ in range(steps)
    ]


def by_torch(steps: list[list[Tensor]], window: int | None) -> list[Tensor]:
    """Step k's queries over the keys of steps 0..k, laid end to end: step 0's that its root sees,
    and its own of each later step."""
    ends = torch.arange(ROWS * LENGTH).view(ROWS, 1, LENGTH)
    document = torch.bucketize(ends, CUMULATIVE.unique(), right=True)
    ago = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    outputs = []
    for k, (query, _, _) in enumerate(steps):
        root = (document.mT == document) & (ago >= 0) & (ago + k < (window or LENGTH + K))
        chain = torch.eye(LENGTH, dtype=torch.bool).repeat(1, k).expand(ROWS, -1, -1)
        keys, values = (
            torch.cat([step[part] for step in steps[: k + 1]], dim=2) for part in (1, 2)
        )
        mask = torch.cat((root, chain), dim=-1).unsqueeze(1)
        outputs.append(F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True))
    return outputs


def by_us(steps: list[list[Tensor]], window: int | None) -> list[Tensor]:
    kv_cache = UnrollKVCache(CUMULATIVE.to(steps[0][0].device), LENGTH, 1, window)
    return [kv_cache.attend(0, *step) for step in steps]


Attend = Callable[[list[list[Tensor]], int | None], list[Tensor]]


def run(
    attend: Attend, steps: list[list[Tensor]], window: int | None, like: torch.Tensor
) -> list[list[Tensor]]:
    """Outputs of all steps; gradients of all queries, keys and values, of a random sum of the
    outputs; as float64 on the CPU."""
    inputs = [[part.to(like).requires_grad_() for part in step] for step in steps]
    outputs = attend(inputs, window)
    generator = torch.Generator().manual_seed(1)
    total = sum(
        (output * torch.randn(output.shape, generator=generator).to(like)).sum()
        for output in outputs
    )
    assert isinstance(total, Tensor)
    total.backward()
    gradients = [part.grad for step in inputs for part in step]
    assert all(output.dtype == like.dtype for output in outputs)
    return [
        [x.detach().cpu().double() for x in tensors if x is not None]
        for tensors in (outputs, gradients)
    ]


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, as a part of the largest entry."""
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True)
    )


def check(
    like: Tensor, shape: str, window: int | None, of_outputs: float, of_gradients: float
) -> None:
    steps = [[part.to(like.dtype).double() for part in step] for step in noise(SHAPES[shape])]
    outputs, gradients = run(by_us, steps, window, like)
    torchs_outputs, torchs_gradients = run(
        by_torch, steps, window, torch.empty(0, dtype=torch.float64)
    )
    assert furthest(outputs, torchs_outputs) < of_outputs
    assert furthest(gradients, torchs_gradients) < of_gradients


@pytest.fixture(params=["kernel", "products"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the CPU's kernel, and as on a device without one; in blocks that are shorter than
    documents."""
    monkeypatch.setattr(packed_attention, "ROWS", 3)
    if request.param == "products":
        monkeypatch.setattr(packed_attention, "_has_fused_kernel", lambda query: False)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_outputs_and_gradients_are_torchs_over_all_keys(shape: str, window: int | None) -> None:
    check(torch.empty(0), shape, window, of_outputs=1e-6, of_gradients=2e-6)
    check(torch.empty(0, dtype=torch.float64), shape, window, of_outputs=1e-12, of_gradients=1e-12)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("window", [None, 9])
def test_sixteen_bits_are_near(window: int | None) -> None:
    check(
        torch.empty(0, dtype=torch.bfloat16), "grouped", window, of_outputs=1e-2, of_gradients=2e-2
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_gpu_computes_the_same(shape: str, window: int | None) -> None:
    check(
        torch.empty(0, dtype=torch.bfloat16, device="cuda"),
        shape,
        window,
        of_outputs=1e-2,
        of_gradients=2e-2,
    )
    check(
        torch.empty(0, dtype=torch.float64, device="cuda"),
        shape,
        window,
        of_outputs=1e-12,
        of_gradients=1e-12,
    )


def test_float32_rotary_tables_leave_the_projections_dtype() -> None:
    """What comes of bfloat16 projections and float32 tables under autocast."""
    query, key, value = noise(SHAPES["grouped"], steps=1)[0]
    mixed = by_us([[query, key, value.bfloat16()]], None)[0]
    assert torch.equal(
        mixed, by_us([[query.bfloat16(), key.bfloat16(), value.bfloat16()]], None)[0]
    )


def two_steps(cumulative_lengths: Tensor, longest: int, steps: list[list[Tensor]]) -> Tensor:
    kv_cache = UnrollKVCache(cumulative_lengths, longest, 1, 9)
    return torch.stack([kv_cache.attend(0, *step) for step in steps]).square().sum()


def test_nothing_asks_for_data() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        steps = [
            [part.bfloat16().requires_grad_() for part in step]
            for step in noise(SHAPES["other values"])
        ]
        two_steps(CUMULATIVE, LENGTH, steps).backward()
        assert all(
            part.grad is not None and part.grad.shape == part.shape
            for step in steps
            for part in step
        )


@pytest.mark.long  # a compiler
def test_it_is_one_graph_for_all_lengths() -> None:
    compiled = torch.compile(two_steps, backend="aot_eager", fullgraph=True)
    steps = noise(SHAPES["grouped"], steps=2)
    parts = [part.requires_grad_() for step in steps for part in step]
    # the second shows what varies, the third is nothing new
    for lengths in ([13, 27], [5, 17, 18], [1, 2, 19, 18]):
        packing = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), max(lengths)
        with torch._dynamo.config.patch(error_on_recompile=len(lengths) == 4):
            ours = torch.autograd.grad(compiled(*packing, steps), parts)
        theirs = torch.autograd.grad(two_steps(*packing, steps), parts)
        assert furthest(list(ours), list(theirs)) < 1e-5


@pytest.mark.parametrize(("window", "growth"), [(None, 4), (100, 1)])
def test_memory_is_linear_in_the_length(window: int | None, growth: int) -> None:
    """The largest tensor that is allocated anywhere, kernels included, for one document of 512
    tokens and for one of 2,048."""
    largest = []
    for length in (512, 2048):
        steps = [
            [part.requires_grad_() for part in step]
            for step in noise((2, 2, 16, 16), 2, length, rows=1)
        ]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            kv_cache = UnrollKVCache(
                torch.tensor([0, length], dtype=torch.int32), length, 1, window
            )
            torch.stack([kv_cache.attend(0, *step) for step in steps]).sum().backward()
        assert profiler.profiler is not None
        events = profiler.profiler.kineto_results.events()
        largest.append(max(event.nbytes() for event in events if event.name() == "[memory]"))
    assert largest[1] <= growth * largest[0]
