"""Read the metadata of GGUF files quickly, and find out what is wrong with a broken file.

gguf's own reader makes a numpy array of each string and each number, which takes half a minute for
a vocabulary of 262,144 tokens. The reader here skips the contents of the vocabulary. They are not
needed, because transformers reads the tokens of a tokenizer with a reader of its own. This module
does not import torch, so that a broken file is refused in a second.
"""

import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType

from specdistill.common.errors import UserError, join_lines

# The longest array of numbers that is read. Arrays of a model's config have one number for each
# layer, and arrays of a vocabulary one for each token.
MAX_ARRAY_LENGTH = 4096
MAGIC = b"GGUF"
DOWNLOAD_AGAIN = "a whole GGUF file: download or copy it again"


class MetadataReader(gguf.GGUFReader):
    """gguf's reader, which skips the contents of strings in arrays and of long arrays.

    An array of strings keeps its length, because the number of tokens is the vocabulary's size; its
    strings are empty.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        # Read the header of an array: the type of its elements, and their number.
        data = self.data.data
        element_type, length = struct.unpack_from("<IQ", data, orig_offs)
        types = [GGUFValueType.ARRAY, GGUFValueType(element_type)]
        end = orig_offs + struct.calcsize("<IQ")
        if element_type == GGUFValueType.STRING:
            # Each string is its length in 8 bytes, followed by its content.
            for _ in range(length):
                end += 8 + struct.unpack_from("<Q", data, end)[0]
            return end - orig_offs, [self.data[:0]], [0] * length, types
        if length > MAX_ARRAY_LENGTH:
            end += length * np.dtype(self.gguf_scalar_to_np[types[1]]).itemsize
            return end - orig_offs, [], [], types
        return super()._get_field_parts(orig_offs, raw_type)


def open_gguf(path: Path | str) -> MetadataReader:
    """Return a reader of a file. It is the same reader as long as the file is unchanged."""
    stat = Path(path).stat()
    return _open_gguf(str(path), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4)
def _open_gguf(path: str, size: int, mtime_ns: int) -> MetadataReader:
    return MetadataReader(path)


def check_gguf(path: Path, key: str) -> None:
    """Raise UserError, naming `key`, unless a file is a whole GGUF file.

    Only its metadata is read.
    """
    with path.open("rb") as file:
        beginning = file.read(len(MAGIC))
    if beginning != MAGIC:
        raise UserError(
            key,
            got=f"{path}, which is no GGUF file: it begins with {beginning!r}, not with {MAGIC!r}",
            expected=DOWNLOAD_AGAIN,
        )
    try:
        reader = open_gguf(path)
    except (struct.error, ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
        # At the end of a file gguf raises an error of whatever it reads there. Only the error for
        # too few weights ("reshape") can be told apart.
        reason = (
            "cut short"
            if "reshape" in str(error)
            else f"cut short or broken: {join_lines(str(error))}"
        )
        raise UserError(
            key,
            got=f"{path}, which is {reason} ({path.stat().st_size:,} bytes)",
            expected=DOWNLOAD_AGAIN,
        ) from error
    if "split.count" in reader.fields and reader.fields["split.count"].contents() > 1:
        raise UserError(
            key,
            got=f"{path}, one of {reader.fields['split.count'].contents()} parts of a model",
            expected="one file: llama-gguf-split --merge FIRST_PART MERGED.gguf makes it",
        )
