"""Count, without a GPU, what a GPU would do in a training step and in a decoding round.

It prints a JSON line for each part.

    # exits with 1 if training waits for the host, or if a part takes 5 % more than is recorded
    make cuda-check
    make cuda-check ARGS="record=true"  # replaces bench/results/cuda_check.json

Under the CUDA build of torch, tensors without content are on `cuda:0`. Their schemas, dtypes and
devices are those of a GPU, and nothing is computed. The numbers of a part:

- `kernels`: operations that write. A GPU may take several kernels for one operation.
- `traffic_gb`: what all operations except matrix products and attention read and write.
- `tflop`: floating-point operations of matrix products and attention.
- `waits`: blocking copies between host and device, and operations whose result has a shape that
  depends on data.

Autograd's engine does not take such tensors. So the gradients are counted on the CPU, with the
chunk sizes of a GPU. The same holds for a step under `train.torch_compile`, which is counted as
torch's compiler fuses it for a CPU.
"""

import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn
from torch._dynamo import callback
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx import GraphModule
from torch.utils.flop_counter import flop_registry
from transformers import LlamaConfig, LlamaForCausalLM

from bench.llama_8b import NUM_STEPS, TARGET
from specdistill.advice.plan.accounting import (
    VIEW_OPERATIONS,
    Ledger,
    count_training_step,
    list_tensors,
)
from specdistill.cli.command import run
from specdistill.common.errors import ExitCode
from specdistill.data.rows.packing import collate
from specdistill.decoding.kv_cache import DraftKVCache
from specdistill.decoding.readers import CachedTarget
from specdistill.decoding.transformers_models import pad_rows
from specdistill.decoding.tree import Tree
from specdistill.methods import METHODS
from specdistill.methods.eagle3.advice import Eagle3Advice
from specdistill.methods.eagle3.module import Eagle3Draft, check_aux_layers
from specdistill.methods.sizes import PlannedDraft, WeightlessTarget
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import validate_recipe
from specdistill.targets import packed_attention
from specdistill.targets.frozen import FrozenTarget, compile_layers
from specdistill.targets.packed_rows import (
    Documents,
    build_length_inputs,
    find_sdpa_configs,
    replace_attention,
    run_by_lengths,
)
from specdistill.training.losses import head_loss
from specdistill.training.objective import ForwardInputs, Objective

aten = torch.ops.aten

# The counts that were accepted last, which `make cuda-check` compares with.
RECORD = Path(__file__).with_name("results") / "cuda_check.json"
# Counts may exceed the record by 5 % before the check fails, so that small changes pass.
MAX_RATIO_TO_RECORD = 1.05

# The device of tensors without content. No such device has to exist.
DEVICE = "cuda:0"

# The training step: rows of a micro-batch, tokens of a row, and tokens of the draft vocabulary.
NUM_ROWS = 4
LENGTH = 2048
VOCABULARY = 32_000
PROMPT_LENGTH = 2048  # tokens of the sequence that a round continues

# A tree of 60 nodes: node 0 follows the root, and nodes 2k + 1 and 2k + 2 follow node k.
TREE = Tree(tuple((node - 1) // 2 if node else -1 for node in range(60)))

# The keys that a recipe must have. Their values are never used.
RECIPE = {
    "method": "eagle3",
    "target": {"model": "x"},
    "data": {"source": "x"},
    "train": {"output_dir": "x"},
}
# A draft model of about a billion parameters, of the shape of Llama-3.2-1B.
DRAFT_MODEL = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128_256, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip

# The host waits for a blocking copy between host and device.
COPY_OPERATIONS = {aten._to_copy, aten.copy_}

# The host waits for operations whose result, or the shape of the result, depends on values.
WAITING_OPERATIONS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.unique_dim,
    aten._unique2,
}


packed_attention.capability = lambda device: (9, 0)  # type: ignore[assignment]  # an H100's: there is no driver to ask
# Four operations for each query element and key position: two matrix products, each with a
# multiplication and an addition.
# torch's own formula assumes that heads come before positions.
flop_registry[aten._flash_attention_forward] = lambda query, key, *_, **__: (
    4 * query.numel() * key.shape[1]
)


class Options(Section):
    """The options of this script."""

    record: bool = option(False, "write the counts to bench/results/cuda_check.json")


class LaunchLedger(Ledger):
    """A Ledger that also counts kernels and what the host waits for.

    Attributes:
        device: the type of device whose operations are counted.
        kernels: operations that write.
        waits: blocking copies between host and device, and operations whose result has a shape
            that depends on data. The host waits for both.
        in_graph: whether a compiled graph runs. Its kernels are counted when it is called, all at
            once.
        compiles: whether torch is compiling; what it runs meanwhile does not count.
    """

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.device = device
        self.kernels = 0
        self.waits = 0
        self.in_graph = False
        self.compiles = False

        # While torch compiles, it runs the operations itself. They must not be counted.
        callback.on_compile_start(lambda _: vars(self).update(compiles=True))
        callback.on_compile_end(lambda _: vars(self).update(compiles=False))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch.compile also compiles while this mode is active."""
        # With torch's default, False, torch.compile compiles nothing while a mode is active.
        return True

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operation of torch, and count its kernel, traffic, arithmetic and wait."""
        # What torch runs while it compiles is not counted. In a compiled graph, only the arithmetic
        # and the memory of matrix products and attention are counted here: all kernels, and their
        # traffic, were counted when the graph was called (see `compile_graph`).
        if self.compiles or (self.in_graph and func.overloadpacket not in flop_registry):
            return func(*args, **(kwargs or {}))

        # Run the operation, and let the base class count its memory, traffic and arithmetic.
        inputs = list_tensors((args, kwargs))
        input_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except DynamicOutputShapeException:
            # The size of `tensor[mask]` depends on the values of the mask, for which the host would
            # wait. Count this wait, and go on as if the whole mask were true.
            if func.overloadpacket is not aten.index:
                raise
            self.waits += 1
            indices = expand_masks(cast(Sequence[Tensor | None], args[1]))
            result = super().__torch_dispatch__(func, types, (args[0], indices), kwargs)

        # Count a kernel if the operation writes to an operand or to new memory. Views do neither.
        operation = func.overloadpacket
        outputs = list_tensors(result)
        writes = func._schema.is_mutable or any(
            tensor.untyped_storage()._cdata not in input_storages for tensor in outputs
        )
        device_types = {tensor.device.type for tensor in (*inputs, *outputs)}
        on_device = self.device in device_types
        if writes and on_device and operation not in VIEW_OPERATIONS and not self.in_graph:
            self.kernels += 1

        # Count a wait for a blocking copy between host and device, and for a result that depends on
        # values.
        is_copy = operation in COPY_OPERATIONS and device_types == {"cpu", "cuda"}
        blocks = is_copy and not (kwargs or {}).get("non_blocking")
        if blocks or (operation in WAITING_OPERATIONS and on_device):
            self.waits += 1
        return result

    def compile_graph(self, module: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
        """Return a function that runs a graph and counts its kernels; a torch.compile backend.

        Inductor, the usual backend, fuses operations of a graph into fewer kernels. The function
        counts these fused kernels, and the bytes that they read and write (traffic). But it runs
        the operations one by one, without compiling them. Matrix products and attention count as
        kernels without traffic. `__torch_dispatch__` counts their arithmetic when they run.

        Args:
            module: the traced graph.
            inputs: example inputs of the graph: tensors with shapes and dtypes, but without
                content.
        """
        # These modules are imported only here, because they warn of torch's own deprecations.
        from torch._inductor.compile_fx import _recursive_post_grad_passes, fake_tensor_prop
        from torch._inductor.debug import DebugContext
        from torch._inductor.graph import GraphLowering
        from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
        from torch._inductor.virtualized import V

        # Let Inductor plan its kernels, by the same calls as in `torch._inductor.compile_fx`, but
        # stop before it generates code. The plan is the list `lowered.scheduler.nodes`, with one
        # node for each kernel after fusion.
        with unset_fake_temporarily():
            mode = fake_tensor_prop(module, inputs)
        with unset_fake_temporarily(), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            _recursive_post_grad_passes(module, False)
            lowered = GraphLowering(module, shape_env=mode.shape_env)
            with V.set_graph_handler(lowered), V.set_real_inputs(inputs):
                lowered.run(*inputs)
                lowered._update_scheduler()

                # Nodes that run nothing are in the list, too. They are no kernels.
                kernels = [
                    node
                    for node in lowered.scheduler.nodes
                    if not isinstance(node, NopKernelSchedulerNode)
                ]
                # Add up the traffic, but not that of matrix products and attention. These are
                # external kernels: Inductor generates no code for them, but calls existing kernels.
                generated_kernels = [
                    node for node in kernels if not isinstance(node, ExternKernelSchedulerNode)
                ]
                traffic = sum(node.get_read_write_buffers_sizes() for node in generated_kernels)

        def call(*graph_inputs: Tensor) -> object:
            """Run the graph once, and add its kernels and traffic to the counts."""
            # While `in_graph` is set, `__torch_dispatch__` counts no kernels and no traffic again.
            self.kernels += len(kernels)
            self.traffic += traffic
            self.in_graph = True
            try:
                return module.forward(*graph_inputs)
            finally:
                self.in_graph = False

        return make_boxed_func(call)

    def compile(self, target: FrozenTarget, objective: nn.Module) -> None:
        """Compile target and objective as `train.torch_compile=true` does, to count their kernels.

        The backend is `compile_graph`, for the forward and for the backward pass.
        """
        from torch._inductor.decomposition import select_decomp_table

        # Inductor uses the same two settings to simplify graphs and to split forward and backward.
        partition = {
            "decompositions": select_decomp_table,
            "partition_fn": min_cut_rematerialization_partition,
        }
        backend = aot_autograd(
            fw_compiler=self.compile_graph, bw_compiler=self.compile_graph, **partition
        )
        compile_layers({"torch_compile": True, "torch_compile_backend": backend}, target, objective)


def expand_masks(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Replace each mask in the indices of `tensor[indices]` by integer indices.

    Tensors without content cannot say how many elements of a mask are true. So all of them are
    taken as true: a mask of d dimensions becomes d index tensors, which have one index for each
    element of the mask. The values of the indices do not matter, because nothing is computed.
    """
    expanded: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            expanded += [index.new_empty(index.numel(), dtype=torch.long)] * index.dim()
        else:
            expanded.append(index)
    return expanded


@contextmanager
def enable_autocast() -> Iterator[None]:
    """Turn on bfloat16 autocast for CUDA, as `train.bf16=true` does.

    The two settings are made directly, because `torch.autocast("cuda")` turns itself off on a
    machine without a GPU.
    """
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def plan_head() -> PlannedDraft:
    """Return the EAGLE-3 head that is counted."""
    return Eagle3Advice().plan_draft(TARGET, None, {"vocab_size": VOCABULARY})


def main(options: Options) -> ExitCode:
    """Count a GPU's kernels, memory traffic, arithmetic and waits, and compare with the record.

    No GPU is used: tensors without content stand for those on a GPU. The counts of each part of
    training and decoding are printed. With `record=true` they replace the record.

    Returns:
        CHECK_FAILED if a count exceeds the record by more than 5 %, or if the host waits for the
        GPU in training; else DONE.
    """
    counts_by_part = count_all_parts()
    for name, counts in counts_by_part.items():
        print(json.dumps({"part": name, **counts}), flush=True)
    if options.record:
        RECORD.write_text(json.dumps(counts_by_part, indent=1) + "\n", encoding="utf-8")

    regressions = find_regressions(counts_by_part)
    for regression in regressions:
        print(regression, file=sys.stderr)
    return ExitCode.CHECK_FAILED if regressions else ExitCode.DONE


def count_all_parts() -> dict[str, dict[str, float]]:
    """Count the kernels, traffic, arithmetic and waits of each part of training and decoding.

    Returns:
        The counts by the name of the part.
    """
    # Build a batch of packed rows. Each row is one document in which all tokens have a loss.
    head = plan_head()
    row = {
        "input_ids": [0] * LENGTH,
        "loss_mask": [1] * LENGTH,
        "document_ids": [0] * LENGTH,
        "position_ids": list(range(LENGTH)),
    }
    batch = collate([row] * NUM_ROWS)

    # Count the parts without gradients: they can run on tensors that pretend to be on a GPU.
    counts_by_part = {}
    with FakeTensorMode() as mode, torch.device(DEVICE):
        for name, part in build_parts(head, batch, mode).items():
            counts_by_part[name] = count(part)

    # Count the steps with gradients on the CPU, where autograd works. Set the size of the chunks in
    # which the loss is computed to that of a GPU, so that the loss takes as many kernels as there.
    head_loss.CHUNK_BYTES["cpu"] = head_loss.CHUNK_BYTES["cuda"]
    name = "training: unroll and loss with gradients"
    counts_by_part[name] = count_step_with_gradients(head, compiled=False)
    counts_by_part[f"{name}, compiled"] = count_step_with_gradients(head, compiled=True)
    counts_by_part["training: target layers, compiled"] = count_compiled_target(batch)
    return counts_by_part


def find_regressions(counts_by_part: dict[str, dict[str, float]]) -> list[str]:
    """Compare the counts with the record, and return a sentence for each regression.

    A regression is a count that exceeds its recorded value by more than 5 %, or a part of training
    in which the host waits for the GPU.
    """
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    regressions = [
        f"{name}: the host waits for the GPU"
        for name, counts in counts_by_part.items()
        if name.startswith("training") and counts["waits"]
    ]
    for name, counts in counts_by_part.items():
        # A part that is not in the record counts as a regression, until it is recorded.
        recorded_counts = recorded.get(name, dict.fromkeys(counts, 0))
        for key, number in counts.items():
            if number > MAX_RATIO_TO_RECORD * recorded_counts[key]:
                regressions.append(f"{name}: {key} {number}, recorded {recorded_counts[key]}")
    return regressions


def count_step_with_gradients(head: PlannedDraft, *, compiled: bool) -> dict[str, float]:
    """Count the kernels, traffic and arithmetic of a head's training step, with gradients.

    The step is the unroll and the loss of the head, forward and backward, on tensors of the CPU.

    Args:
        head: the EAGLE-3 head.
        compiled: whether the head is compiled, as under `train.torch_compile=true`.
    """
    assert head.build is not None
    ledger = LaunchLedger("cpu")
    options: dict[str, Callable[[nn.Module], None]] = {}
    if compiled:
        # `ledger.compile` compiles a target and a head. Here no target runs, because its features
        # are given. So the target is a stand-in, whose `compile` does nothing.
        target = SimpleNamespace(compile=lambda **options: None)
        options["prepare"] = partial(ledger.compile, target)
    count_training_step(
        "eagle3",
        head.build,
        {"ttt_steps": NUM_STEPS},
        TARGET,
        rows=NUM_ROWS,
        length=LENGTH,
        ledger=ledger,
        **options,
    )
    return format_counts(ledger)


def count_compiled_target(batch: ForwardInputs) -> dict[str, float]:
    """Count the kernels, traffic and arithmetic of a pass of the target with compiled layers.

    The pass reads packed rows. Its tensors are on the CPU and have no content, so nothing is
    computed. torch's compiler fuses several operations into one kernel, as it would for a CPU. Each
    fused kernel counts once.
    """
    with FakeTensorMode() as mode:
        batch = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }

        # `_packing` is the function that keeps the documents of a row apart. A real target tries
        # several functions, compares their outputs, and stores its choice in `_packing`. Tensors
        # without content have no outputs to compare. So store the choice of a real target here:
        # `run_by_lengths`, which gives the attention the lengths of the documents.
        target = WeightlessTarget(TARGET)
        vars(target).update(_packing=run_by_lengths)
        ledger = LaunchLedger("cpu")
        # Only the target is compiled. So the objective is a stand-in without layers. Its loss is
        # never called, so any function will do, such as `len`.
        ledger.compile(target, SimpleNamespace(layers=(), compute_row_losses=len))
        with ledger, torch.autocast("cpu", torch.bfloat16):
            run_target_pass(target, check_aux_layers(None, target.num_layers), batch)
    return format_counts(ledger)


def count(run_part: Callable[[], object]) -> dict[str, float]:
    """Run a part of training or decoding, and return the counts of its operations on the GPU."""
    with LaunchLedger() as ledger:
        run_part()
    return format_counts(ledger)


def format_counts(ledger: LaunchLedger) -> dict[str, float]:
    """Return the counts of a ledger by the names that they have in the record."""
    return {
        "kernels": ledger.kernels,
        "traffic_gb": round(ledger.traffic / 1e9, 1),
        "tflop": round(ledger.flops / 1e12, 2),
        "waits": ledger.waits,
    }


def build_parts(
    planned: PlannedDraft, batch: ForwardInputs, mode: FakeTensorMode
) -> dict[str, Callable[[], object]]:
    """Return functions, by name, that run the parts whose operations on a GPU are counted.

    These are parts of a training step without gradients, and the passes of a decoding round. They
    run on a pretended GPU: their tensors have no content, and nothing is computed.

    Args:
        planned: the EAGLE-3 head, which is built here.
        batch: packed rows, whose tensors are replaced by tensors without content.
        mode: the mode that makes tensors without content.
    """
    # Move the batch to the pretended GPU, without its content.
    batch = {
        name: mode.from_tensor(value).to(DEVICE) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }

    # A real target tries several ways to run, compares their outputs, and stores two choices:
    # - `_packing`: the function that keeps the documents of packed rows apart;
    # - `_maskless`: the configs whose attention needs no mask in decoding.
    # Tensors without content have no outputs to compare. So store both here, as on a GPU.
    target = WeightlessTarget(TARGET)
    vars(target).update(_packing=run_by_lengths, _maskless=find_sdpa_configs(target.model))

    # Build the head, its training objective, and a draft model.
    assert planned.build is not None
    head = planned.build(target)
    recipe = validate_recipe(
        METHODS["eagle3"].recipe(), {**RECIPE, "draft": {"ttt_steps": NUM_STEPS}}
    )
    objective = METHODS["eagle3"].load().build_objective(head, recipe, target)
    draft_model = LlamaForCausalLM(LlamaConfig(**DRAFT_MODEL))
    # Decoding runs in bfloat16. A tensor without content cannot be cast in place, so the head is
    # created in this dtype.
    torch.set_default_dtype(torch.bfloat16)
    decoding = Decoding(target, planned.build(target))
    torch.set_default_dtype(torch.float32)
    return {
        "training: target layers": partial(run_target_layers, target, head.aux_layers, batch),
        "training: unroll and loss": partial(compute_unroll_loss, objective, target, batch),
        "training: draft model": partial(run_draft_model, draft_model, batch),
        "decoding: prompt": decoding.prompt,
        "decoding: chain drafted": decoding.draft,
        "decoding: chain verified": decoding.verify,
        "decoding: tree verified and a path kept": decoding.verify_tree,
    }


def run_target_layers(
    target: FrozenTarget, aux_layers: Sequence[int], batch: ForwardInputs
) -> None:
    """Run the layers of the target over packed rows, under bfloat16 autocast."""
    with enable_autocast():
        run_target_pass(target, aux_layers, batch)


@torch.no_grad()
def run_target_pass(target: FrozenTarget, aux_layers: Sequence[int], batch: ForwardInputs) -> None:
    """Run the layers of the target over packed rows, as a training step does to get features.

    Args:
        target: the target.
        aux_layers: the layers whose outputs are features that the draft reads.
        batch: the packed rows.
    """
    rows = {"position_ids_BT": batch["position_ids"], "documents": build_documents(batch)}
    # This target is a WeightlessTarget, whose own `features` returns empty tensors without running
    # the layers. So the method of its base class is called.
    FrozenTarget.features(target, batch["input_ids"], aux_layers, **rows)


def compute_unroll_loss(objective: Objective, target: FrozenTarget, batch: ForwardInputs) -> None:
    """Run the forward pass of a head's training objective, without gradients.

    In this pass the head drafts several steps in a row (the unroll), and the loss of all steps is
    computed. It is run only to count its operations, so the loss is not returned.
    """
    # None stands for the number of the batch in the run. The objective of a head does not use it.
    batch = objective.prepare(batch, None)
    with torch.no_grad(), enable_autocast():
        objective(**batch, **objective.read_target(target, batch))


def run_draft_model(draft: LlamaForCausalLM, batch: ForwardInputs) -> None:
    """Run the layers of a draft model over packed rows."""
    # As in training, replace `sdpa`, which needs a mask to keep documents apart, by this project's
    # attention, which gets the lengths of the documents.
    packed = build_length_inputs(batch["input_ids"], build_documents(batch))
    with enable_autocast(), replace_attention(find_sdpa_configs(draft)):
        draft.model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            use_cache=False,
            **packed,
        )


class Decoding:
    """The passes of a decoding round after a prompt of PROMPT_LENGTH tokens.

    Tensors without content cannot decide what is accepted. So the accepted tokens are fixed
    beforehand, and operations that depend on computed values are left out.
    """

    def __init__(self, target: FrozenTarget, head: Eagle3Draft) -> None:
        # The class of this target returns features without running its layers. Let a copy compute
        # features as FrozenTarget does, so that the operations of the layers are counted.
        self.head = head
        target = copy.copy(target)
        vars(target)["features"] = partial(FrozenTarget.features, target)
        self.reader = CachedTarget(target, head.aux_layers)

    @torch.no_grad()
    def prompt(self) -> None:
        """Read a prompt of PROMPT_LENGTH tokens, in the target and in the head."""
        _, features = self.reader.begin([range(PROMPT_LENGTH)])
        # `rotary` returns cosines and sines in the dtype of its first argument: that of the head.
        rotary = partial(self.head.rotary, self.head.fc.weight)
        self.cache = DraftKVCache(1, rotary, torch.device(DEVICE))
        self._step(torch.zeros(1, PROMPT_LENGTH, dtype=torch.long), self.head.fuse(features))

    @torch.no_grad()
    def draft(self) -> None:
        """Draft a chain of NUM_STEPS tokens."""
        # The zeros stand for the last token and its hidden state. Only their shapes matter here.
        ids = torch.zeros(1, 1, dtype=torch.long)
        hidden = torch.zeros(1, 1, self.head.config.hidden_size, dtype=torch.bfloat16)
        for _ in range(NUM_STEPS):
            ids, hidden = self._step(ids, hidden)

    def _step(self, ids_1T: Tensor, hidden_1TH: Tensor) -> tuple[Tensor, Tensor]:
        """Run one step of the head over T tokens.

        Returns:
            The best next token [1, 1], and the hidden state at the last position [1, 1, H].
        """
        # `argmax` gives the best token as an index into the draft's vocabulary of W tokens.
        # `target_ids_W` has the id of each of these tokens in the target's vocabulary.
        rotary = self.cache.begin_chain([ids_1T.shape[1]])
        normed_1TH, hidden_1TH = self.head(ids_1T, hidden_1TH, rotary, self.cache)
        draft_ids_11 = self.head.logits(normed_1TH[:, -1:]).argmax(-1)
        return self.head.target_ids_W[draft_ids_11], hidden_1TH[:, -1:]

    @torch.no_grad()
    def verify(self) -> None:
        """Read the last token and NUM_STEPS draft tokens in one pass of the target.

        Then keep the cache entries of two draft tokens, as if these had been accepted.
        """
        # Any token ids will do, here 0 to NUM_STEPS. The entry of the first token is always kept.
        # `keep` gets the indices of the draft tokens after it that are kept, too.
        self.reader.read([range(1 + NUM_STEPS)])
        self.reader.keep([[0, 1]])

    @torch.no_grad()
    def verify_tree(self) -> None:
        """Read TREE in one pass of the target.

        Then keep the cache entries and the features of two nodes, as if these had been accepted.
        """
        # Any token ids will do: one for the last token, which is the root, and one for each node.
        _, features = self.reader.read([range(1 + len(TREE.parents))], [TREE])
        self.reader.keep([[1, 4]])
        # The features begin with those of the root, so node n has index n + 1.
        features.at(pad_rows([[0, 2, 5]], torch.device(DEVICE)))


def build_documents(batch: ForwardInputs) -> Documents:
    """Return the documents of a batch of packed rows."""
    return Documents(batch["cumulative_lengths"], batch["longest"])


if __name__ == "__main__":
    sys.exit(run(main, Options))
