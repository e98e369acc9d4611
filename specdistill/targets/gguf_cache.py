"""GGUF files for transformers: read their metadata once, and keep a copy in safetensors.

Later commands load the copy. Copies lie in the assets of the Hub's cache (`HF_HOME`), named by the
sha256 of the file and the dtype of the weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import torch
from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]
from rich.filesize import decimal
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdistill.common.errors import ResourceError, logger
from specdistill.common.folders import create_folder
from specdistill.common.gguf_files import open_gguf
from specdistill.common.hashes import hash_file


@contextmanager
def use_fast_metadata() -> Iterator[None]:
    """Make transformers read GGUF metadata with `MetadataReader`, once for each file.

    transformers 5.23 imports gguf's reader whenever it needs the config, the class of the
    tokenizer, the class of the model or its weights, and takes no reader as an argument.
    """
    original = gguf.GGUFReader
    gguf.GGUFReader = open_gguf  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        gguf.GGUFReader = original  # type: ignore[misc]


def find_converted(file: Path) -> Path | None:
    """Return a folder that holds a GGUF file in safetensors, of any dtype.

    Returns:
        The folder; None if the file has not been converted.
    """
    return min(
        (path for path in _cache_root().glob(f"{hash_file(file)}-*") if path.is_dir()), default=None
    )


def convert_once(
    file: Path, dtype: str, load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]
) -> Path | None:
    """Return the folder that holds a GGUF file in safetensors, and write it first if needed.

    The first process that needs the folder writes it. Others wait.

    Args:
        file: the GGUF file.
        dtype: of the weights.
        load: loads the model and its tokenizer from the file itself.

    Returns:
        The folder; None where it cannot be written.
    """
    folder = _cache_root() / f"{hash_file(file)}-{dtype}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():  # another process may have written it while this one waited
                _convert(file, folder, dtype, load)
    except (OSError, ResourceError) as error:
        logger.warning(
            f"{file}: no copy in safetensors could be written ({error}); the file itself is loaded,"
            " slowly each time. Free space, or set HF_HOME to a writable disk."
        )
        return None
    return folder


def restore_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Give a tokenizer that was loaded from a copy the rules that the copy holds.

    Some classes of transformers add rules of their own that the tokenizer of a GGUF file lacks. For
    example, Qwen2Tokenizer adds a normalizer. For any other folder this does nothing.
    """
    if Path(folder).parent == _cache_root():
        tokenizer._tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))


def _convert(
    file: Path,
    folder: Path,
    dtype: str,
    load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]],
) -> None:
    """Write the model and the tokenizer of a GGUF file into a folder, in safetensors."""
    num_bytes = getattr(torch, dtype).itemsize * sum(
        tensor.n_elements for tensor in open_gguf(file).tensors
    )
    logger.info(
        f"Converting {file} to safetensors, once: {decimal(num_bytes)} in {folder}"
        " (target.cache=false loads the file itself)."
    )
    model, tokenizer = load()
    with create_folder(folder, key="target.cache") as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        # About generation a GGUF file names only the end tokens, which config.json has too.
        (partial / "generation_config.json").unlink(missing_ok=True)


def _cache_root() -> Path:
    return Path(constants.HF_ASSETS_CACHE) / "specdistill" / "gguf"
