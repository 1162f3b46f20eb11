"""Reads token shards: the .bin files of llm.c and of nanoGPT, and the .npy files of build-nanogpt."""

import os
import re
import weakref
from pathlib import Path

import numpy as np

from recipe.utils.errors import UserError, reading

SUFFIXES = (".bin", ".npy")
UINT16, UINT32 = np.dtype("<u2"), np.dtype("<u4")
# Magic number and version at the start of a shard, by the type of its tokens: llm.c's for GPT-2 and for Llama 3.
FORMATS = {UINT16: (20240520, 1), UINT32: (20240801, 7)}
HEADER_BYTES = 256 * 4
GPT2_TOKENS = 50257


def dtype_of(vocab_size: int) -> np.dtype:
    """The type of the tokens in shards of a vocabulary of this size."""
    return UINT16 if vocab_size <= 1 << 16 else UINT32


class ShardReader:
    """The tokens of a shard, `len` of them, read on demand. It uses pread: if a memory-mapped file is truncated, SIGBUS
    ends the process. Raises UserError for a file that is not a shard of a known format, or whose tokens have too few
    bits for `vocab_size`; nanoGPT's is recognized by its tokens, which are below that, or GPT-2's if it is larger."""

    sha256: str  # of the file, if `open_shard` has opened it

    def __init__(self, path: Path, vocab_size: int = GPT2_TOKENS):
        self.path, self._file = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self.dtype, self._begin, self._count = self._layout(vocab_size)
        if self.dtype.itemsize < dtype_of(vocab_size).itemsize:
            raise UserError(
                f"{path}: its tokens have 16 bits, too few for a vocabulary of {vocab_size:,}: another tokenizer made "
                "them; name that one, or prepare the text"
            )

    def _layout(self, vocab_size: int) -> tuple[np.dtype, int, int]:
        """The type of the tokens, the byte at which they begin, and their number."""
        path, header, size = self.path, os.pread(self._file, HEADER_BYTES, 0), os.fstat(self._file).st_size
        if size <= HEADER_BYTES:
            raise UserError(f"{path}: {size:,} bytes are too few for a shard; name another file, or prepare more text")
        if header.startswith(np.lib.format.MAGIC_PREFIX):
            with reading(path, "copy it again, or prepare the text"):
                array = np.load(path, mmap_mode="r")  # which refuses pickles
            if array.ndim != 1 or array.dtype not in FORMATS:
                problem = f"an array of {array.dtype} with {array.ndim} dimensions"
                raise UserError(f"{path}: {problem}; a .npy shard must have one dimension, of uint16 or uint32")
            return array.dtype, array.offset, len(array)
        if _is_headerless(header, max(vocab_size, GPT2_TOKENS)):
            if size % UINT16.itemsize:
                raise UserError(f"{path}: {size:,} bytes for tokens of two each: the file was cut short; copy it again")
            return UINT16, 0, size // UINT16.itemsize
        magic, version, count = np.frombuffer(header.ljust(HEADER_BYTES, b"\0"), "<i4")[:3].tolist()
        dtype = next((dtype for dtype, numbers in FORMATS.items() if numbers == (magic, version)), None)
        if dtype is None:
            starts = " or ".join(f"{number}, {known}" for number, known in FORMATS.values())
            raise UserError(
                f"{path}: not a shard of llm.c (it begins with {magic}, {version}, not {starts}) or nanoGPT; perhaps "
                "of another tokenizer, type (without a header uint16 is read) or byte order. Prepare the text: python "
                "-m recipe.data.prepare --dataset_name TEXT"
            )
        if size != HEADER_BYTES + count * dtype.itemsize:
            raise UserError(
                f"{path}: the header gives {count} tokens ({count * dtype.itemsize} bytes), but {size - HEADER_BYTES} "
                f"bytes follow: the file was cut short, or its tokens are not {dtype}; download or prepare it again"
            )
        return dtype, HEADER_BYTES, count

    def __len__(self) -> int:
        return self._count

    def spans(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The `length` tokens from each of `starts`, (N,) -> (N, length), of `dtype`. Raises UserError if the file was
        cut short."""
        size, offsets = self.dtype.itemsize * length, self._begin + self.dtype.itemsize * starts
        tokens = b"".join([os.pread(self._file, size, offset) for offset in offsets.tolist()])
        if len(tokens) != size * len(starts):
            raise UserError(f"{self.path} was cut short while it was read; download or prepare it again")
        return np.frombuffer(tokens, self.dtype).reshape(len(starts), length)

    def read(self, count: int = -1) -> np.ndarray:
        """The first `count` tokens, or all if there are fewer, (tokens,), of `dtype`."""
        return np.fromfile(self.path, self.dtype, count, offset=self._begin)


def shards_in(directory: Path, pattern: str = "*") -> list[Path]:
    """The .bin files; where there are none, the .npy files with names like build-nanogpt's."""
    arrays = (path for path in directory.glob(f"{pattern}.npy") if re.search(r"(train|val)_\d+\.npy$", path.name))
    return [*directory.glob(f"{pattern}.bin")] or [*arrays]


def _is_headerless(header: bytes, vocab_size: int) -> bool:
    """Whether a file that starts with `header` holds only uint16 tokens below `vocab_size`, as nanoGPT writes them."""
    words = np.frombuffer(header, UINT16)
    if dtype_of(vocab_size) != UINT16:  # any two bytes would be a token of it
        return False
    # Most of a header is zeros, as is every second word of 4-byte tokens; in text, token 0 ("!") is rare.
    return bool(words.max() < vocab_size and (words == 0).mean() < 0.4)
