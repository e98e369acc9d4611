"""Record what each process of a launch computes with a shared and with a whole target.

Run by test_sharding.py:

# with targets in FOLDER/model, and in FOLDER/large to measure memory
accelerate launch --config_file … in_two_processes.py FOLDER
"""

import gc
import json
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from specdistill.common.errors import ResourceError, UserError
from specdistill.data.produce.job import Job
from specdistill.data.rows.row_set import RowTarget
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.methods.models.create import create_draft_model
from specdistill.recipe.sections import DataConfig, LocalRegeneration
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.sharding import count_processes
from specdistill.training.arguments import build_training_arguments
from specdistill.workflows.make_data import open_rows


def compute_outputs(target: FrozenTarget, rank: int) -> list[Tensor]:
    """Return the features and logits of a batch whose tokens and length depend on the rank.

    Each row packs two documents.
    """
    ids = torch.randint(0, 260, (2, 12 + rank), generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        features = target.features(
            ids,
            [0, 2, target.num_layers],
            position_ids_BT=torch.arange(12 + rank).expand(2, -1) % 7,
        )
        return [*features.aux, features.last_hidden, target.logits(features.last_hidden)]


def relative_difference(tensors: Any, references: Any) -> float:
    """Return the largest difference, relative to the largest number of its tensor."""
    pairs = [
        (tensor.float(), reference.float())
        for tensor, reference in zip(tensors, references, strict=True)
    ]
    return max(
        float((tensor - reference).abs().max() / reference.abs().max().clamp_min(1e-9))
        for tensor, reference in pairs
    )


def measure_held_share(target: FrozenTarget) -> float:
    """Return the share of a target's parameters that this process holds."""
    local = [
        getattr(parameter, "_local_tensor", parameter) for parameter in target.model.parameters()
    ]
    return sum(tensor.nbytes for tensor in local) / sum(
        parameter.nbytes for parameter in target.model.parameters()
    )


def peak_process_bytes() -> int:
    """Return the most memory that this process ever held at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def catch_refusal(attempt: Any) -> str:
    try:
        attempt()
    except (UserError, ResourceError) as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    tiny, large = str(folder / "model"), folder / "large"
    arguments = build_training_arguments({"output_dir": str(folder / "run"), "report_to": "none"})
    rank = arguments.process_index
    whole = FrozenTarget.load(tiny)
    expected = compute_outputs(whole, rank)
    seen: dict[str, Any] = {
        "processes": count_processes(),
        "embedding": list(whole.tensor("embed_tokens.weight").shape),
    }
    target = FrozenTarget.load(tiny, shard="layers")
    heads = [build_eagle3(loaded_target).state_dict().values() for loaded_target in (target, whole)]
    seen["layers"] = {
        "difference": relative_difference(compute_outputs(target, rank), expected),
        "is_same": target.identity.is_same(whole.identity),
        "num_parameters": target.num_parameters,
        "head": relative_difference(*heads),
        "draft": relative_difference(
            *(
                create_draft_model(loaded_target, num_layers=2).state_dict().values()
                for loaded_target in (target, whole)
            )
        ),
        "class": type(target.model).__name__,
    }
    config = DataConfig(
        source=str(folder / "rows.jsonl"),
        max_length=64,
        cache_dir=str(folder / "cache"),
        regenerate=LocalRegeneration(num_tokens=64),
    )
    data = partial(open_rows, Job(config, RowTarget.from_target(target)))
    seen["device_map"] = catch_refusal(lambda: FrozenTarget.load(tiny, device_map="auto"))
    if large.exists():
        # load once before measuring, so that imports do not count as memory of the target
        target = FrozenTarget.load(tiny, shard="layers")
        gc.collect()
        bytes_before = psutil.Process().memory_info().rss
        target = FrozenTarget.load(str(large), shard="layers")
        seen["peak_bytes"] = peak_process_bytes() - bytes_before
        seen["held_share"] = measure_held_share(target)
    # last: the refusal ends the first process, and the other one waits for that process
    seen["regenerate"] = catch_refusal(data)
    (folder / f"process-{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
