"""An EAGLE-1 head in the layout of an engine."""

from pathlib import Path

import torch

from specdistill.engines.engine import Engine, HeadExport
from specdistill.errors import UserError
from specdistill.methods.checkpoint import is_copy, shape_to_json, stored_dtype, write_draft
from specdistill.methods.eagle.checkpoint import read_eagle
from specdistill.methods.eagle.module import EagleDraft
from specdistill.methods.folder import new_folder
from specdistill.targets.files import EMBEDDING, TargetFiles, needed


def export(draft: Path, engine: Engine, output: Path, target: TargetFiles | None, num_speculative_tokens: int) -> None:
    """Write a head for an engine. Raises UserError, before anything is written, for what the engine cannot express, and for a head with
    an embedding or an output layer that is not the target's.
    """
    layout = engine.layouts["eagle"]
    config, tensors = read_eagle(draft, target, key="draft")
    layout.check(engine.name, config, draft)
    for name in EagleDraft.shared & tensors.keys():
        if not is_copy(tensors.pop(name), needed(target, f"{draft} repeats its {name}").tensor(name)):
            raise UserError("draft", got=f"{draft} with another {name} than its target has", expected="a head made for it")
    dtype = stored_dtype(tensors.values())
    if layout.fc_bias:
        tensors.setdefault("fc.bias", torch.zeros(config.hidden_size, dtype=dtype))
    if layout.needs_target:
        target = needed(target, layout.needs_target)
        tensors[EMBEDDING] = target.tensor(EMBEDDING).to(dtype)
    described = layout.config(HeadExport(shape_to_json(config, dtype), config, target, num_speculative_tokens))
    with new_folder(output) as partial:
        write_draft(partial, described, tensors)
