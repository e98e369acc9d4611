"""What a GPU would do with a step of training and a round of decoding, counted without one: a JSON line for each part.

    make cuda-check                     # exits with 1 where training waits for the host, or a part takes 5 % more than is recorded
    make cuda-check ARGS="record=true"  # replaces bench/results/cuda_check.json

Under the CUDA build of torch tensors are on `cuda:0` and have no content: schemas, dtypes and devices are a GPU's, and nothing is computed.
`kernels`: operations that write; a GPU may take several for one. `traffic_gb`: read and written by all but matrix products and attention.
`waits`: copies between host and device that block, and operations whose result's shape depends on data. Autograd's engine takes no such
tensors, so the gradients are counted on the CPU, with the chunks of a GPU; and so is what `train.torch_compile` makes of a step, as
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
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import callback
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import LlamaConfig, LlamaForCausalLM

from bench.memory import NUM_STEPS, TARGET
from specdistill.command import run
from specdistill.decoding.kv_cache import DraftKVCache
from specdistill.decoding.readers import CachedTarget
from specdistill.decoding.tree import Tree
from specdistill.errors import ExitCode
from specdistill.losses import chunked
from specdistill.methods import METHODS
from specdistill.methods.chains.unroll import objective
from specdistill.methods.eagle3 import method as eagle3
from specdistill.methods.eagle3.module import check_aux_layers
from specdistill.methods.sizes import PlannedDraft, WeightlessTarget
from specdistill.planning.accounting import UNWRITTEN, Ledger, training_step
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import validate
from specdistill.rows.packing import collate
from specdistill.targets import packed_attention
from specdistill.targets.frozen import FrozenTarget, compile_layers
from specdistill.targets.packed_rows import (
    Documents,
    attending,
    by_lengths,
    lengths_of,
    sdpa_configs,
)

aten = torch.ops.aten

# What an H200 reaches: operations of matrix products, and bytes, a second. Assumed: bench/gpu.py measures them where there is one.
PRODUCTS, BANDWIDTH = 650e12, 3.65e12
FP8_BYTES = 3  # of an activation that is read and rounded, in a compiled layer
ADAMW_BYTES = 32  # of a parameter in a step: it, its gradient and moments are read, all but the gradient written, and the norm taken

RECORD = Path(__file__).with_name("results") / "cuda_check.json"
ALLOWED = 1.05  # of what is recorded
DEVICE, ROWS, LENGTH, VOCABULARY = "cuda:0", 4, 2048, 32_000
PROMPT = 2048  # tokens of the sequence that a round continues
TREE = Tree(tuple((node - 1) // 2 if node else -1 for node in range(60)))
RECIPE = {
    "method": "eagle3",
    "target": {"model": "x"},
    "data": {"source": "x"},
    "train": {"output_dir": "x"},
}
# A draft model of about a billion parameters, as Llama-3.2-1B
DRAFT_MODEL = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128_256, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip
COPIES = {aten._to_copy, aten.copy_}
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.unique_dim, aten._unique2}


packed_attention.capability = lambda device: (9, 0)  # type: ignore[assignment]  # an H100's: there is no driver to ask
# torch's own formula takes heads to come before positions.
flop_registry[aten._flash_attention_forward] = lambda query, key, *_, **__: (
    4 * query.numel() * key.shape[1]
)


class Options(Section):
    record: bool = option(False, "replace bench/results/cuda_check.json by what is counted")


class Launches(Ledger):
    """A Ledger that also counts kernels, and what the host waits for."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.device = device
        self.kernels = self.copies = 0
        self.in_graph = self.compiles = False
        callback.on_compile_start(lambda _: vars(self).update(compiles=True))
        callback.on_compile_end(lambda _: vars(self).update(compiles=False))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else nothing is compiled within it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.compiles or (self.in_graph and func.overloadpacket not in flop_registry):
            return func(*args, **(kwargs or {}))
        given = tensors((args, kwargs))
        held = {tensor.untyped_storage()._cdata for tensor in given}
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except DynamicOutputShapeException:
            if func.overloadpacket is not aten.index:
                raise
            self.copies += 1
            result = super().__torch_dispatch__(func, types, (args[0], whole(args[1])), kwargs)
        operation, made = func.overloadpacket, tensors(result)
        writes = func._schema.is_mutable or any(
            tensor.untyped_storage()._cdata not in held for tensor in made
        )
        on_device = any(tensor.device.type == self.device for tensor in (*given, *made))
        self.kernels += writes and on_device and operation not in UNWRITTEN and not self.in_graph
        between = {tensor.device.type for tensor in (*given, *made)} == {"cpu", "cuda"}
        blocks = operation in COPIES and between and not (kwargs or {}).get("non_blocking")
        self.copies += blocks or (operation in WAITS and on_device)
        return result

    def graph(self, module: Any, inputs: Any) -> Any:
        """A compiler's backend: counts the kernels of each call as they are fused, and computes them one by one."""
        # Here, and not above: they warn of torch's own deprecations.
        from torch._inductor.compile_fx import _recursive_post_grad_passes, fake_tensor_prop
        from torch._inductor.debug import DebugContext
        from torch._inductor.graph import GraphLowering
        from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
        from torch._inductor.virtualized import V

        with unset_fake_temporarily():
            mode = fake_tensor_prop(module, inputs)
        with unset_fake_temporarily(), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            _recursive_post_grad_passes(module, False)
            lowered = GraphLowering(module, shape_env=mode.shape_env)
            with V.set_graph_handler(lowered), V.set_real_inputs(inputs):
                lowered.run(*inputs)
                lowered._update_scheduler()
                kernels = [
                    node
                    for node in lowered.scheduler.nodes
                    if not isinstance(node, NopKernelSchedulerNode)
                ]
                fused = [
                    node for node in kernels if not isinstance(node, ExternKernelSchedulerNode)
                ]
                traffic = sum(node.get_read_write_buffers_sizes() for node in fused)

        def call(*given: Tensor) -> Any:
            self.kernels += len(kernels)
            self.traffic += traffic
            self.in_graph = True
            try:
                return module.forward(*given)
            finally:
                self.in_graph = False

        return make_boxed_func(call)

    def compile(self, target: Any, objective: Any) -> None:
        """As `train.torch_compile=true` does."""
        from torch._inductor.decomposition import select_decomp_table

        partition = {
            "decompositions": select_decomp_table,
            "partition_fn": min_cut_rematerialization_partition,
        }
        backend = aot_autograd(fw_compiler=self.graph, bw_compiler=self.graph, **partition)
        compile_layers({"torch_compile": True, "torch_compile_backend": backend}, target, objective)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def whole(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices in the place of masks, for as many elements as masks that are true throughout would choose."""
    chosen: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            chosen += [index.new_empty(index.numel(), dtype=torch.long)] * index.dim()
        else:
            chosen.append(index)
    return chosen


@contextmanager
def autocast() -> Iterator[None]:
    """As under `train.bf16=true`. torch's own context refuses a device that is not there."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def main(options: Options) -> ExitCode:
    head = eagle3.planned(TARGET, None, {"vocab_size": VOCABULARY})
    row = {"input_ids": [0], "loss_mask": [1], "document_ids": [0]}
    packed = {name: value * LENGTH for name, value in row.items()} | {
        "position_ids": list(range(LENGTH))
    }
    batch = collate([packed] * ROWS)
    found = {}
    with FakeTensorMode() as mode, torch.device(DEVICE):
        for name, part in parts_of(head, batch, mode).items():
            found[name] = count(part)
    chunked.CHUNK_BYTES["cpu"] = chunked.CHUNK_BYTES["cuda"]
    for compiled in (False, True):
        ledger = Launches("cpu")
        step: dict[str, Any] = {"rows": ROWS, "length": LENGTH, "ledger": ledger}
        if compiled:
            step["prepare"] = partial(
                ledger.compile, SimpleNamespace(compile=lambda **options: None)
            )
        training_step("eagle3", head.build, {"ttt_steps": NUM_STEPS}, TARGET, **step)
        found["training: unroll and loss with gradients" + ", compiled" * compiled] = counted(
            ledger
        )
    found["training: target layers, compiled"] = compiled_target(batch)
    for name, counts in found.items():
        print(json.dumps({"part": name, **counts}), flush=True)
    print(
        json.dumps(
            {"part": "compiled step on an H200, computed", **tokens_per_second(found, head)}
        ),
        flush=True,
    )
    if options.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    worse = [
        f"{name} waits for the host"
        for name in found
        if name.startswith("training") and found[name]["waits"]
    ]
    for name, counts in found.items():
        known = recorded.get(name, dict.fromkeys(counts, 0))
        worse += [
            f"{name}: {key} {counts[key]}, recorded {known[key]}"
            for key in counts
            if counts[key] > ALLOWED * known[key]
        ]
    print(*worse, sep="\n", file=sys.stderr, end="\n" * bool(worse))
    return ExitCode.CHECK_FAILED if worse else ExitCode.DONE


def tokens_per_second(found: dict[str, dict[str, float]], head: PlannedDraft) -> dict[str, int]:
    """Of a compiled step with AdamW; and with a target in FP8, whose layers' products take half of the time."""
    target, draft = (
        found[f"training: {part}, compiled"]
        for part in ("target layers", "unroll and loss with gradients")
    )
    traffic = (
        1e9 * (target["traffic_gb"] + draft["traffic_gb"]) + ADAMW_BYTES * head.parts.parameters
    )
    seconds = 1e12 * (target["tflop"] + draft["tflop"]) / PRODUCTS + traffic / BANDWIDTH
    config, tokens = TARGET.text, ROWS * LENGTH
    rounded = (
        FP8_BYTES
        * tokens
        * config.num_hidden_layers
        * (3 * config.hidden_size + config.intermediate_size)
    )
    in_fp8 = seconds - 0.5e12 * target["tflop"] / PRODUCTS + rounded / BANDWIDTH
    return {"bfloat16": round(tokens / seconds), "target in FP8": round(tokens / in_fp8)}


def compiled_target(batch: dict[str, Any]) -> dict[str, float]:
    with FakeTensorMode() as mode:
        batch = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        target = WeightlessTarget(TARGET)
        vars(target).update(_packing=by_lengths)
        ledger = Launches("cpu")
        ledger.compile(target, SimpleNamespace(layers=(), row_losses=len))
        with ledger, torch.autocast("cpu", torch.bfloat16):
            target_pass(target, check_aux_layers(None, target.num_layers), batch)
    return counted(ledger)


def count(run_part: Callable[[], Any]) -> dict[str, float]:
    with Launches() as ledger:
        run_part()
    return counted(ledger)


def counted(ledger: Launches) -> dict[str, float]:
    return {
        "kernels": ledger.kernels,
        "traffic_gb": round(ledger.traffic / 1e9, 1),
        "tflop": round(ledger.flops / 1e12, 2),
        "waits": ledger.copies,
    }


def parts_of(
    planned: PlannedDraft, batch: dict[str, Any], mode: FakeTensorMode
) -> dict[str, Callable[[], Any]]:
    batch = {
        name: mode.from_tensor(value).to(DEVICE) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }
    target = WeightlessTarget(TARGET)
    vars(target).update(_packing=by_lengths, _maskless=sdpa_configs(target.model))
    assert planned.build is not None
    head = planned.build(target)
    recipe = validate(METHODS["eagle3"].recipe(), {**RECIPE, "draft": {"ttt_steps": NUM_STEPS}})
    step: Any = objective(head, recipe, target)
    draft: Any = LlamaForCausalLM(LlamaConfig(**DRAFT_MODEL))
    torch.set_default_dtype(torch.bfloat16)  # such a tensor cannot be cast in place
    decoding = Decoding(target, planned.build(target))
    torch.set_default_dtype(torch.float32)
    return {
        "training: target layers": partial(target_layers, target, head.aux_layers, batch),
        "training: unroll and loss": partial(unroll, step, target, batch),
        "training: draft model": partial(draft_model, draft, batch),
        "decoding: prompt": decoding.prompt,
        "decoding: chain drafted": decoding.draft,
        "decoding: chain verified": decoding.verify,
        "decoding: tree verified and a path kept": decoding.verify_tree,
    }


def target_layers(target: FrozenTarget, aux_layers: Any, batch: dict[str, Any]) -> None:
    with autocast():
        target_pass(target, aux_layers, batch)


@torch.no_grad()
def target_pass(target: FrozenTarget, aux_layers: Any, batch: dict[str, Any]) -> None:
    rows = {"position_ids_BT": batch["position_ids"], "documents": documents_of(batch)}
    FrozenTarget.features(target, batch["input_ids"], aux_layers, **rows)


def unroll(step: Any, target: FrozenTarget, batch: dict[str, Any]) -> None:
    """As the Trainer takes the loss."""
    batch = step.prepare(batch, None)
    with torch.no_grad(), autocast():
        step(**batch, **step.read_target(target, batch))


def draft_model(draft: Any, batch: dict[str, Any]) -> None:
    packed = lengths_of(batch["input_ids"], documents_of(batch))
    with autocast(), attending(sdpa_configs(draft)):
        draft.model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            use_cache=False,
            **packed,
        )


class Decoding:
    """A round at PROMPT tokens, as far as it does not depend on what is computed."""

    def __init__(self, target: FrozenTarget, head: Any) -> None:
        self.head, target = head, copy.copy(target)
        vars(target)["features"] = partial(FrozenTarget.features, target)
        self.reader = CachedTarget(target, head.aux_layers)

    @torch.no_grad()
    def prompt(self) -> None:
        _, features = self.reader.begin([range(PROMPT)])
        self.cache = DraftKVCache(
            1, partial(self.head.rotary, self.head.fc.weight), torch.device(DEVICE)
        )
        self._step(torch.zeros(1, PROMPT, dtype=torch.long), self.head.fuse(features))

    @torch.no_grad()
    def draft(self) -> None:
        ids, hidden = (
            torch.zeros(1, 1, dtype=torch.long),
            torch.zeros(1, 1, self.head.config.hidden_size, dtype=torch.bfloat16),
        )
        for _ in range(NUM_STEPS):
            ids, hidden = self._step(ids, hidden)

    def _step(self, ids_1T: Tensor, hidden_1TH: Tensor) -> tuple[Tensor, Tensor]:
        normed, hidden = self.head(
            ids_1T, hidden_1TH, self.cache.extend([ids_1T.shape[1]]), self.cache
        )
        return self.head.target_ids_W[self.head.logits(normed[:, -1:]).argmax(-1)], hidden[:, -1:]

    @torch.no_grad()
    def verify(self) -> None:
        self.reader.read([range(1 + NUM_STEPS)])
        self.reader.keep([[0, 1]])

    @torch.no_grad()
    def verify_tree(self) -> None:
        _, features = self.reader.read([range(1 + len(TREE.parents))], [TREE])
        self.reader.keep([[1, 4]])
        features.at([0, 2, 5])


def documents_of(batch: dict[str, Any]) -> Documents:
    return Documents(batch["cumulative_lengths"], batch["longest"])


if __name__ == "__main__":
    sys.exit(run(main, Options))
