"""Read the metadata of GGUF files quickly, and find out what is wrong with a broken file.

The reader of the package gguf (0.19) makes a numpy array of each string and each number, which
takes half a minute for a vocabulary of 262,144 tokens. `MetadataReader` skips the contents of the
vocabulary. They are not needed, because transformers reads the tokenizer with a reader of its own.

This module does not import torch, so that a broken file is refused in a second.
"""

import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType

from specdistill.common.errors import UserError, join_lines

# The longest array of numbers that is read. The limit separates the two kinds of arrays in these
# files: settings of a model have one number per layer, and vocabularies have one number per token.
MAX_ARRAY_LENGTH = 4096
MAGIC = b"GGUF"  # the first bytes of every GGUF file
DOWNLOAD_AGAIN = "a whole GGUF file: download or copy it again"


class MetadataReader(gguf.GGUFReader):
    """A reader of GGUF metadata that skips the strings of arrays, and long arrays of numbers.

    An array of strings keeps its length, because the number of tokens is the size of the
    vocabulary. Its strings are empty.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        """Read a value of the metadata, or skip it if it is an array of strings or a long array.

        This overrides a private method of gguf.GGUFReader (gguf 0.19), which reads all values.

        Args:
            orig_offs: the offset of the value in the file, in bytes.
            raw_type: the type of the value.

        Returns:
            The number of bytes that the value takes, its parts as arrays, the indices of the parts
            that hold data, and the types: for an array, ARRAY and the type of its elements.
        """
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)

        # Read the header of an array: the type of its elements in 4 bytes, and their number in 8.
        data = self.data.data
        element_type, length = struct.unpack_from("<IQ", data, orig_offs)
        types = [GGUFValueType.ARRAY, GGUFValueType(element_type)]
        end = orig_offs + struct.calcsize("<IQ")

        # Skip each string: its length in 8 bytes, followed by its content. Return a single empty
        # part instead, and refer to it (index 0) once for each string, so that the array keeps its
        # length.
        if element_type == GGUFValueType.STRING:
            for _ in range(length):
                end += 8 + struct.unpack_from("<Q", data, end)[0]
            return end - orig_offs, [self.data[:0]], [0] * length, types

        # Skip a long array of numbers, which then has no parts. Read a short one as usual.
        if length > MAX_ARRAY_LENGTH:
            end += length * np.dtype(self.gguf_scalar_to_np[types[1]]).itemsize
            return end - orig_offs, [], [], types
        return super()._get_field_parts(orig_offs, raw_type)


def open_gguf(path: Path | str) -> MetadataReader:
    """Return a reader of the metadata of a GGUF file.

    The reader comes from a cache if the file was read before and has the same size and time of
    change.
    """
    stat = Path(path).stat()
    return _open_gguf(str(path), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4)
def _open_gguf(path: str, size: int, mtime_ns: int) -> MetadataReader:
    """Return a reader of a file; `size` and `mtime_ns` are only part of the key of the cache."""
    return MetadataReader(path)


def check_gguf(path: Path, key: str) -> None:
    """Raise UserError, naming `key`, unless a file is a complete GGUF file with a whole model.

    Only the metadata of the file is read.
    """
    # Every GGUF file begins with the same four bytes (MAGIC).
    with path.open("rb") as file:
        beginning = file.read(len(MAGIC))
    if beginning != MAGIC:
        raise UserError(
            key,
            got=f"{path}, which is no GGUF file: it begins with {beginning!r}, not with {MAGIC!r}",
            expected=DOWNLOAD_AGAIN,
        )

    # Read the metadata. This fails for a file that was not downloaded or copied to its end.
    try:
        reader = open_gguf(path)
    except (struct.error, ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
        # If the file ends too early, the error of gguf depends on what gguf was reading there. Only
        # one error is certain to mean a file that is cut short: numpy cannot reshape too few bytes
        # to a tensor.
        is_cut_short = "reshape" in str(error)
        reason = "cut short" if is_cut_short else f"cut short or broken: {join_lines(str(error))}"
        raise UserError(
            key,
            got=f"{path}, which is {reason} ({path.stat().st_size:,} bytes)",
            expected=DOWNLOAD_AGAIN,
        ) from error

    # A model may be split into several files. transformers reads only a single file.
    if "split.count" in reader.fields and reader.fields["split.count"].contents() > 1:
        raise UserError(
            key,
            got=f"{path}, one of {reader.fields['split.count'].contents()} parts of a model",
            expected="a single file. Merge the parts with"
            " `llama-gguf-split --merge FIRST_PART MERGED.gguf`",
        )
