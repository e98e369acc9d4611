"""A draft model for vLLM and SGLang: the model's own folder, its config.json readable for transformers before and since version 5."""

import json
import shutil
from pathlib import Path
from typing import Any

from specdistill.errors import UserError
from specdistill.export.folder import link, new_folder
from specdistill.methods.checkpoint import read_config, read_tensors
from specdistill.targets.files import TargetFiles


def export_draft_model(folder: Path, engine: str, output: Path, target: TargetFiles | None) -> None:
    """Write the folder of a draft model anew. Raises UserError when its weights are broken, or when its vocabulary is not as large as the
    target's (vLLM and SGLang compare token ids).
    """
    config = read_config(folder, "draft")
    if target is not None and config.get("vocab_size") != target.vocab_size:
        got = f"{engine} for {folder} with a vocabulary of {config.get('vocab_size')}"
        raise UserError("engine", got=got, expected=f"{target.vocab_size}, as {target.name} has")
    read_tensors(folder, "draft")
    with new_folder(output) as partial:
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                (link if path.suffix in (".safetensors", ".bin") else shutil.copy2)(path, partial / path.name)
        text = json.dumps(with_both_spellings(config), indent=2) + "\n"
        (partial / "config.json").write_text(text, encoding="utf-8")


def with_both_spellings(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with `rope_theta`, `rope_scaling` and `torch_dtype` beside `rope_parameters` and `dtype`, or the other way round."""
    rope = config.get("rope_parameters")
    if rope is None and "rope_theta" in config:
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
    written = dict(config)
    if rope and "rope_theta" in rope:  # not those of layers of several kinds
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        written["rope_parameters"] = rope
        written["rope_theta"] = rope["rope_theta"]
        written["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    dtype = config.get("dtype") or config.get("torch_dtype")
    return {**written, "dtype": dtype, "torch_dtype": dtype} if dtype else written
