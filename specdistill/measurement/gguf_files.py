"""The GGUF files that llama.cpp's server is started with: the target's, and the draft's."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gguf

from specdistill.engines.engine import Served
from specdistill.engines.llama_cpp import convert
from specdistill.errors import UserError
from specdistill.recipe.llama_cpp import LlamaCppConfig
from specdistill.repositories import resolve, split_gguf
from specdistill.targets.files import TargetFiles
from specdistill.targets.identity import combined, file_hashes

MODEL, DRAFT = "eval.llama_cpp.model", "eval.llama_cpp.model_draft"
MOST_OTHER = 0.01  # share of the tokens that a converter may spell in another way


class GgufTarget(NamedTuple):
    """dtype: its file type. weights: sha256 of its sha256, as of a target that is a GGUF file."""

    path: Path
    dtype: str
    weights: str


def target_file(config: LlamaCppConfig, target: TargetFiles, tokenizer: Any) -> GgufTarget:
    """Raises UserError without such a file, and for one with another vocabulary."""
    named = resolve(config.model, MODEL) if config.model else target.name
    file = split_gguf(named)[1]
    if file is None or (config.model and not Path(named).is_file()):
        convert = f"python convert_hf_to_gguf.py {target.name} --outtype f16 --outfile target.gguf"
        raise UserError(
            MODEL, got=config.model or "null", expected=f"the target as a GGUF file, as llama.cpp writes it: {convert}"
        )
    path = Path(named) if Path(named).is_file() else target.fetch(file) / file
    try:
        fields = gguf.GGUFReader(path).fields
        tokens, dtype = (
            fields["tokenizer.ggml.tokens"].contents(),
            gguf.LlamaFileType(fields["general.file_type"].contents()).name,
        )
    except (ValueError, KeyError, IndexError) as error:
        raise UserError(MODEL, got=f"{path} ({error})", expected="the GGUF file of a model") from error
    ours = tokenizer.get_vocab()
    if config.model and sum(tokens[index : index + 1] != [token] for token, index in ours.items()) > MOST_OTHER * len(ours):
        raise UserError(MODEL, got=f"{path}, with another vocabulary", expected=f"{target.name}, as a GGUF file")
    return GgufTarget(path, dtype, combined(file_hashes([path])))


def with_files(served: Served, config: LlamaCppConfig, target: Path) -> Served:
    """What is served, from files. Raises UserError without one of a draft."""
    if served.in_target:
        return replace(served, target=str(target))
    draft = resolve(config.model_draft, DRAFT) if config.model_draft else None
    if draft is None or not Path(draft).is_file():
        command = convert(served, "EXPORTED", served.target_name)
        expected = f"the draft as a GGUF file, as llama.cpp writes it of its export (specdistill export engine=gguf): {command}"
        raise UserError(DRAFT, got=draft or "null", expected=expected)
    return replace(served, target=str(target), output=Path(draft))
