"""The unroll's attention equals torch's masked attention over all keys at once.

Its memory is linear in the length, and it compiles to one graph that asks for no data.
"""

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
# The first row has documents of 1, 12 and 7 tokens, the second one of 20. Empty documents stand
# between them and at the end, as padding does.
CUMULATIVE = torch.tensor([0, 1, 13, 13, 20, 40, 40, 40], dtype=torch.int32)
WINDOWS = [None, 7, 9, 12, 40]
SHAPES = {
    "one head each": (4, 4, 16, 16),
    "grouped": (4, 2, 16, 16),
    "other values": (6, 2, 12, 8),
    "wide values": (2, 2, 8, 12),
}


def make_noise(
    shape: tuple[int, int, int, int], steps: int = K, length: int = LENGTH, rows: int = ROWS
) -> list[list[Tensor]]:
    """Return query, key and value of each step, laid out as projections leave them."""
    heads, groups, size, value_size = shape
    generator = torch.Generator().manual_seed(0)
    parts = [(heads, size), (groups, size), (groups, value_size)]
    return [
        [torch.randn(rows, length, *part, generator=generator).transpose(1, 2) for part in parts]
        for _ in range(steps)
    ]


def attend_by_torch(steps: list[list[Tensor]], window: int | None) -> list[Tensor]:
    """Attend by torch, from the queries of step k to the keys of steps 0..k laid end to end.

    A query sees the keys of step 0 that its root sees, and its own key of each later step.
    """
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


def attend_by_cache(steps: list[list[Tensor]], window: int | None) -> list[Tensor]:
    kv_cache = UnrollKVCache(CUMULATIVE.to(steps[0][0].device), LENGTH, 1, window)
    return [kv_cache.attend(0, *step) for step in steps]


Attend = Callable[[list[list[Tensor]], int | None], list[Tensor]]


def compute_outputs_and_gradients(
    attend: Attend, steps: list[list[Tensor]], window: int | None, like: torch.Tensor
) -> list[list[Tensor]]:
    """Return the outputs of all steps and the gradients of all queries, keys and values.

    The gradients are of a random sum of the outputs; all are returned as float64 on the CPU.
    """
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


def compute_largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest entry."""
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True)
    )


def check_against_torch(
    like: Tensor, shape: str, window: int | None, output_tolerance: float, gradient_tolerance: float
) -> None:
    steps = [[part.to(like.dtype).double() for part in step] for step in make_noise(SHAPES[shape])]
    outputs, gradients = compute_outputs_and_gradients(attend_by_cache, steps, window, like)
    torchs_outputs, torchs_gradients = compute_outputs_and_gradients(
        attend_by_torch, steps, window, torch.empty(0, dtype=torch.float64)
    )
    assert compute_largest_difference(outputs, torchs_outputs) < output_tolerance
    assert compute_largest_difference(gradients, torchs_gradients) < gradient_tolerance


@pytest.fixture(params=["kernel", "products"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the CPU's kernel, or products as without it, in blocks shorter than documents."""
    monkeypatch.setattr(packed_attention, "ROWS", 3)
    if request.param == "products":
        monkeypatch.setattr(packed_attention, "_has_fused_kernel", lambda query: False)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_outputs_and_gradients_equal_torchs_over_all_keys(shape: str, window: int | None) -> None:
    check_against_torch(
        torch.empty(0), shape, window, output_tolerance=1e-6, gradient_tolerance=2e-6
    )
    check_against_torch(
        torch.empty(0, dtype=torch.float64),
        shape,
        window,
        output_tolerance=1e-12,
        gradient_tolerance=1e-12,
    )


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("window", [None, 9])
def test_bfloat16_attention_is_close_to_torchs(window: int | None) -> None:
    check_against_torch(
        torch.empty(0, dtype=torch.bfloat16),
        "grouped",
        window,
        output_tolerance=1e-2,
        gradient_tolerance=2e-2,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_attention_on_a_gpu_equals_torchs(shape: str, window: int | None) -> None:
    check_against_torch(
        torch.empty(0, dtype=torch.bfloat16, device="cuda"),
        shape,
        window,
        output_tolerance=1e-2,
        gradient_tolerance=2e-2,
    )
    check_against_torch(
        torch.empty(0, dtype=torch.float64, device="cuda"),
        shape,
        window,
        output_tolerance=1e-12,
        gradient_tolerance=1e-12,
    )


def test_float32_rotary_tables_keep_the_dtype_of_projections() -> None:
    """Under autocast, bfloat16 projections and float32 tables give queries and keys of float32."""
    query, key, value = make_noise(SHAPES["grouped"], steps=1)[0]
    mixed = attend_by_cache([[query, key, value.bfloat16()]], None)[0]
    assert torch.equal(
        mixed, attend_by_cache([[query.bfloat16(), key.bfloat16(), value.bfloat16()]], None)[0]
    )


def compute_loss(cumulative_lengths: Tensor, longest: int, steps: list[list[Tensor]]) -> Tensor:
    kv_cache = UnrollKVCache(cumulative_lengths, longest, 1, 9)
    return torch.stack([kv_cache.attend(0, *step) for step in steps]).square().sum()


def test_attention_runs_on_tensors_without_data() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        steps = [
            [part.bfloat16().requires_grad_() for part in step]
            for step in make_noise(SHAPES["other values"])
        ]
        compute_loss(CUMULATIVE, LENGTH, steps).backward()
        assert all(
            part.grad is not None and part.grad.shape == part.shape
            for step in steps
            for part in step
        )


@pytest.mark.long  # a compiler
def test_attention_compiles_to_one_graph_for_all_lengths() -> None:
    compiled = torch.compile(compute_loss, backend="aot_eager", fullgraph=True)
    steps = make_noise(SHAPES["grouped"], steps=2)
    parts = [part.requires_grad_() for step in steps for part in step]
    # the second lengths show what varies, so the third must not recompile
    for lengths in ([13, 27], [5, 17, 18], [1, 2, 19, 18]):
        packing = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), max(lengths)
        with torch._dynamo.config.patch(error_on_recompile=len(lengths) == 4):
            ours = torch.autograd.grad(compiled(*packing, steps), parts)
        theirs = torch.autograd.grad(compute_loss(*packing, steps), parts)
        assert compute_largest_difference(list(ours), list(theirs)) < 1e-5


@pytest.mark.parametrize(("window", "growth"), [(None, 4), (100, 1)])
def test_memory_is_linear_in_the_length(window: int | None, growth: int) -> None:
    """The test compares the largest allocations, kernels included, for 512 and for 2,048 tokens."""
    largest = []
    for length in (512, 2048):
        steps = [
            [part.requires_grad_() for part in step]
            for step in make_noise((2, 2, 16, 16), 2, length, rows=1)
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
