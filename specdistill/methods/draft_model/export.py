"""A draft model for an engine: a GGUF file, or the model's own folder with a config.json for transformers before and since version 5."""

import json
import shutil
from pathlib import Path
from typing import Any

from specdistill.engines.engine import Engine
from specdistill.errors import UserError
from specdistill.methods.checkpoint import link, new_folder, read_config, read_tensors
from specdistill.methods.draft_model.gguf import write_gguf
from specdistill.targets.files import TargetFiles


def export(
    folder: Path,
    engine: Engine,
    output: Path,
    target: TargetFiles | None,
    num_speculative_tokens: int,
    *,
    dtype: str = "f16",
) -> None:
    """Write a draft model for an engine; `dtype` is that of a GGUF file.

    Raises UserError, before anything is written, when its weights are broken, when its vocabulary is not as large as the target's
    (engines compare token ids), or when it is no model that can be a GGUF file.
    """
    config = read_config(folder, "draft")
    if target is not None and config.get("vocab_size") != target.vocab_size:
        got = f"{engine.name} for {folder} with a vocabulary of {config.get('vocab_size')}"
        raise UserError("engine", got=got, expected=f"{target.vocab_size}, as {target.name} has")
    if engine.layouts["draft_model"].gguf_types:
        write_gguf(folder, output, dtype)
        return
    read_tensors(folder, "draft")
    with new_folder(output) as partial:
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                (link if path.suffix in (".safetensors", ".bin") else shutil.copy2)(path, partial / path.name)
        rewritten = json.dumps(with_both_spellings(config), indent=2) + "\n"
        (partial / "config.json").write_text(rewritten, encoding="utf-8")


def with_both_spellings(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with `rope_theta`, `rope_scaling` and `torch_dtype` beside `rope_parameters` and `dtype`, or the other way round."""
    rope = config.get("rope_parameters")
    if rope is None and "rope_theta" in config:
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
    both = dict(config)
    if rope and "rope_theta" in rope:  # not those of layers of several kinds
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        both["rope_parameters"] = rope
        both["rope_theta"] = rope["rope_theta"]
        both["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    dtype = config.get("dtype") or config.get("torch_dtype")
    return {**both, "dtype": dtype, "torch_dtype": dtype} if dtype else both
