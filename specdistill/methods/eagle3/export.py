"""An EAGLE-3 head in the layout of an engine."""

from pathlib import Path

import torch

from specdistill.engines.engine import Engine, HeadExport
from specdistill.methods.checkpoint import shape_to_json, stored_dtype, write_draft
from specdistill.methods.eagle3.checkpoint import read_eagle3, resolve_embedding
from specdistill.methods.folder import new_folder
from specdistill.targets.files import EMBEDDING, HEAD, TargetFiles, needed


def export(draft: Path, engine: Engine, output: Path, target: TargetFiles | None, num_speculative_tokens: int) -> None:
    """Write a head for an engine. Raises UserError, before anything is written, for what the engine cannot express."""
    layout = engine.layouts["eagle3"]
    config, tensors = read_eagle3(draft, target, key="draft")
    comparable = EMBEDDING in tensors and config.hidden_size == config.target_hidden_size
    config = resolve_embedding(config, tensors, target.tensor(EMBEDDING) if target and comparable else None)
    layout.check(engine.name, config, draft)
    dtype = stored_dtype(tensors.values())
    if HEAD not in tensors:
        tensors[HEAD] = needed(target, f"{draft} leaves out {HEAD}").tensor(HEAD).to(dtype)
    if config.prunes_vocabulary:
        ids = torch.arange(config.draft_vocab_size) + tensors["d2t"]
        tensors |= {"d2t": tensors["d2t"].long(), "t2d": torch.isin(torch.arange(config.vocab_size), ids)}
    if layout.needs_target:
        target = needed(target, layout.needs_target)
        if EMBEDDING not in tensors:
            tensors[EMBEDDING] = target.tensor(EMBEDDING).to(dtype)
    described = layout.config(HeadExport(shape_to_json(config, dtype), config, target, num_speculative_tokens))
    with new_folder(output) as partial:
        write_draft(
            partial, described, {name.replace("layers.0.", layout.first_layer): tensor for name, tensor in tensors.items()}
        )
