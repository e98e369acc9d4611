"""Convert a GGUF file to safetensors once, and find the copy again.

transformers takes long to load a GGUF file, so later commands load the copy. Copies lie in the
assets folder of the Hub's cache (below `HF_HOME`). They are named by the sha256 of the file and the
dtype of the weights.
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
    """Make transformers read the metadata of each GGUF file only once while the block runs.

    transformers 5.23 reads a GGUF file with the slow `gguf.GGUFReader`. It reads the file again for
    the config, the class of the tokenizer, the class of the model and the weights. It takes no
    reader as an argument, so the class in the package gguf is replaced by the fast `open_gguf`,
    which keeps its readers.
    """
    original = gguf.GGUFReader
    gguf.GGUFReader = open_gguf  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        gguf.GGUFReader = original  # type: ignore[misc]


def find_converted(file: Path) -> Path | None:
    """Find a safetensors copy of a GGUF file that was written before, in any dtype.

    Returns:
        The folder of the copy; None if the file has not been converted.
    """
    # The name of the folder is the hash of the file, followed by the dtype. Of several copies, the
    # first by name is taken.
    return min(
        (path for path in _cache_root().glob(f"{hash_file(file)}-*") if path.is_dir()), default=None
    )


def convert_once(
    file: Path, dtype: str, load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]
) -> Path | None:
    """Return the folder with the safetensors copy of a GGUF file, and write the copy if needed.

    The first process that needs the copy writes it, and other processes wait.

    Args:
        file: the GGUF file.
        dtype: the dtype of the weights.
        load: loads the model and its tokenizer from the GGUF file.

    Returns:
        The folder; None if it cannot be written.
    """
    folder = _cache_root() / f"{hash_file(file)}-{dtype}"
    if folder.is_dir():
        return folder

    # Without a writable disk the copy is left out, because loading the file itself works, too.
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():  # another process may have written it while this one waited
                _convert(file, folder, dtype, load)
    except (OSError, ResourceError) as error:
        logger.warning(
            f"{file}: no safetensors copy could be written ({error}), so each command loads the"
            " GGUF file itself, which is slow. Free disk space, or set HF_HOME to a writable disk."
        )
        return None
    return folder


def restore_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Restore the rules of a tokenizer that was loaded from the safetensors copy of a GGUF file.

    A tokenizer class of transformers may add rules that the GGUF file does not have. For example,
    Qwen2Tokenizer adds a normalizer. So the rules are read again from tokenizer.json in the copy. A
    tokenizer from any other folder is left as it is.
    """
    if Path(folder).parent == _cache_root():
        tokenizer._tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))


def _convert(
    file: Path,
    folder: Path,
    dtype: str,
    load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]],
) -> None:
    """Write the model and the tokenizer of a GGUF file into a folder, in safetensors.

    Args:
        file: the GGUF file.
        folder: the folder to write.
        dtype: the dtype of the weights.
        load: loads the model and its tokenizer from the GGUF file.
    """
    # Say how large the copy will be, because writing takes a while.
    num_bytes = getattr(torch, dtype).itemsize * sum(
        tensor.n_elements for tensor in open_gguf(file).tensors
    )
    logger.info(
        f"Converting {file} to a safetensors copy of {decimal(num_bytes)} in {folder}, which later"
        " commands load. To load the GGUF file itself instead, set target.cache=false."
    )

    # Write model and tokenizer into a temporary folder, which is renamed once it is complete.
    model, tokenizer = load()
    with create_folder(folder, key="target.cache") as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        # generation_config.json is not needed: the only settings of generation in a GGUF file are
        # its end tokens, which config.json has, too.
        (partial / "generation_config.json").unlink(missing_ok=True)


def _cache_root() -> Path:
    """Return the folder that holds all copies of GGUF files."""
    return Path(constants.HF_ASSETS_CACHE) / "specdistill" / "gguf"
