"""What every process of a launch sees of one target, shared and whole; run by test_sharding.py.

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


def outputs(target: FrozenTarget, rank: int) -> list[Tensor]:
    """Features and logits of a batch of this process's own, of its own length, two packed documents
    a row."""
    ids = torch.randint(0, 260, (2, 12 + rank), generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        features = target.features(
            ids,
            [0, 2, target.num_layers],
            position_ids_BT=torch.arange(12 + rank).expand(2, -1) % 7,
        )
        return [*features.aux, features.last_hidden, target.logits(features.last_hidden)]


def difference(some: Any, others: Any) -> float:
    """The largest, as a share of the largest number of its tensor."""
    pairs = [(one.float(), other.float()) for one, other in zip(some, others, strict=True)]
    return max(
        float((one - other).abs().max() / other.abs().max().clamp_min(1e-9)) for one, other in pairs
    )


def held(target: FrozenTarget) -> float:
    """The share of a target's parameters that this process holds."""
    local = [
        getattr(parameter, "_local_tensor", parameter) for parameter in target.model.parameters()
    ]
    return sum(tensor.nbytes for tensor in local) / sum(
        parameter.nbytes for parameter in target.model.parameters()
    )


def peak_process_bytes() -> int:
    """Return the most memory that this process ever held at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def refusal(attempt: Any) -> str:
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
    expected = outputs(whole, rank)
    seen: dict[str, Any] = {
        "processes": count_processes(),
        "embedding": list(whole.tensor("embed_tokens.weight").shape),
    }
    target = FrozenTarget.load(tiny, shard="layers")
    heads = [build_eagle3(each).state_dict().values() for each in (target, whole)]
    seen["layers"] = {
        "difference": difference(outputs(target, rank), expected),
        "is_same": target.identity.is_same(whole.identity),
        "num_parameters": target.num_parameters,
        "head": difference(*heads),
        "draft": difference(
            *(
                create_draft_model(each, num_layers=2).state_dict().values()
                for each in (target, whole)
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
    seen["device_map"] = refusal(lambda: FrozenTarget.load(tiny, device_map="auto"))
    if large.exists():
        # what is imported on the way is no part of the target
        target = FrozenTarget.load(tiny, shard="layers")
        gc.collect()
        bytes_before = psutil.Process().memory_info().rss
        target = FrozenTarget.load(str(large), shard="layers")
        seen["peak_bytes"] = peak_process_bytes() - bytes_before
        seen["held_share"] = held(target)
    # last: the first process ends by it, for which the other waits
    seen["regenerate"] = refusal(data)
    (folder / f"process-{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
