"""GGUF files, versions 2 and 3: metadata and the places of tensors. The file is mapped, not read.

gguf's own GGUFReader trusts every length, so that a damaged one makes it count to 2^60, and it takes a minute for the
400,000 strings of Llama 3. tests/test_formats.py compares the two. Layout: ggml/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import InputError, short

MAGIC = b"GGUF"
CUT = "is truncated or damaged in its header: download it again"
MOST = 1 << 24  # the most entries of a list; vocabularies have 2^18
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # value types


@dataclass
class TensorInfo:
    """shape is in torch's order, with the contiguous dimension last; type is ggml's number."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int  # within the file
    nbytes: int = 0


class GGUFFile:
    """A mapped file. metadata: key -> number, bool, string, list of strings or numpy array; tensors: name ->
    TensorInfo."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with open(self.path, "rb") as f:
                self.data = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as e:
            raise InputError(f"cannot read {self.path}: {e}; expected a GGUF file") from None
        try:
            self._read()
        except UnicodeDecodeError as e:
            raise self.error(f"holds text that is not UTF-8 ({e.reason}): download it again") from None

    def error(self, message: str) -> InputError:
        return InputError(f"{self.path}: {message}")

    def _read(self) -> None:
        self.offset = 0
        if self._bytes(4) != MAGIC:
            raise self.error("is no GGUF file")
        if (version := self._number("I")) not in (2, 3):
            found = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
            raise self.error(f"is GGUF of {found}, expected little-endian of version 2 or 3: convert it again")
        n_tensor, n_value = self._count(), self._count()
        self.metadata: dict[str, Any] = {}
        for _ in range(n_value):
            key = self._string()
            if key in self.metadata:
                raise self.error(f"has the key {short(key)} twice")
            self.metadata[key] = self._value(key, self._number("I"))
        infos = [self._tensor() for _ in range(n_tensor)]
        align = self.metadata.get("general.alignment", 32)
        if type(align) is not int or not 8 <= align <= 1 << 20 or align & (align - 1):
            raise self.error(f"general.alignment is {short(align)}, expected a power of 2 of at least 8")
        start = -(-self.offset // align) * align
        self.tensors: dict[str, TensorInfo] = {}
        for t in infos:
            self._place(t, start, align)
            if t.name in self.tensors:
                raise self.error(f"has the tensor {short(t.name)} twice")
            self.tensors[t.name] = t

    def _place(self, t: TensorInfo, start: int, align: int) -> None:
        """Find the place of a tensor. Raises InputError if it is not completely in the file."""
        sizes = type_sizes()
        if t.type not in sizes:
            raise self.error(f"tensor {t.name} is of type {t.type}, which is not known: update the gguf package")
        block, size = sizes[t.type]
        if t.offset % align or t.shape[-1] % block:
            raise self.error(f"tensor {t.name} {list(t.shape)} at {t.offset} is not aligned: download it again")
        t.offset, t.nbytes = start + t.offset, math.prod(t.shape) // block * size
        if t.offset + t.nbytes > len(self.data):
            raise self.error(f"is truncated, tensor {t.name} ends at byte {t.offset + t.nbytes:,} and the file at "
                             f"{len(self.data):,}: download it again")  # fmt: skip

    def _bytes(self, n: int) -> memoryview:
        if n > len(self.data) - self.offset:
            raise self.error(CUT)
        self.offset += n
        return self.data[self.offset - n : self.offset]

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def _count(self) -> int:
        if (n := self._number("Q")) > MOST:
            raise self.error(f"counts {n:,} of something in its header: it is damaged, download it again")
        return n

    def _string(self) -> str:
        return str(self._bytes(self._number("Q")), "utf-8")

    def _strings(self, n: int) -> list[str]:
        """n strings, read in a tight loop: vocabularies have 400,000 tokens and merges."""
        data, position, end, size, out = self.data, self.offset, len(self.data) - 8, struct.Struct("<Q").unpack_from, []
        for _ in range(n):
            start = position + 8
            position = start + size(data, position)[0] if position <= end else end + 9
            if position > end + 8:
                raise self.error(CUT)
            out.append(str(data[start:position], "utf-8"))
        self.offset = position
        return out

    def _value(self, key: str, value_type: int) -> Any:
        if value_type == STRING:
            return self._string()
        if value_type == ARRAY:
            of, n = self._number("I"), self._count()
            if of == STRING:
                return self._strings(n)
            if of in SCALARS:
                dtype = np.dtype(f"<{SCALARS[of]}") if of != BOOL else np.dtype(bool)
                return np.frombuffer(self._bytes(n * dtype.itemsize), dtype)
            value_type = of
        if value_type not in SCALARS:
            raise self.error(f"{short(key)} is of type {value_type}, expected a number, text, or a list of these")
        return self._number(SCALARS[value_type])

    def _tensor(self) -> TensorInfo:
        name, n = self._string(), self._number("I")
        if not 1 <= n <= 4:
            raise self.error(f"tensor {short(name)} has {n} dimensions, expected 1 to 4: download it again")
        shape = tuple(self._number("Q") for _ in range(n))[::-1]
        if not 0 < math.prod(shape) < 1 << 48:
            raise self.error(f"tensor {short(name)} has shape {list(shape)}: download it again")
        return TensorInfo(name, shape, self._number("I"), self._number("Q"))

    def raw(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """A tensor's bytes, uint8 [rows, bytes of a row] (a vector is one row), in the mapped file."""
        t = self.tensors[name]
        return np.frombuffer(self.data[t.offset : t.offset + t.nbytes], np.uint8).reshape(rows_of(t), -1)[rows]

    def number(self, key: str, default: Any = None, whole: bool = True) -> Any:
        """A number of the metadata. Raises InputError if it is no number, or missing without a default."""
        value = self._typed(key, default, (int,) if whole else (int, float), "a number")
        if not math.isfinite(value):
            raise self.error(f"{key} is {value}, expected a number")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, default, (str,), "text")

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, default, (bool,), "true or false")

    def texts(self, key: str) -> list[str]:
        return self._typed(key, None, (list,), "a list of texts")

    def array(self, key: str, n: int) -> np.ndarray | None:
        """A list of n numbers of the metadata; None if there is none."""
        value = self.metadata.get(key)
        if value is not None and (not isinstance(value, np.ndarray) or len(value) != n):
            raise self.error(f"{key} is {short(value)}, expected {n} numbers")
        return value

    def _typed(self, key: str, default: Any, kinds: tuple[type, ...], expected: str) -> Any:
        if (value := self.metadata.get(key, default)) is None:
            raise self.error(f"has no {key}: convert it again with a newer convert_hf_to_gguf.py")
        if type(value) not in kinds:
            raise self.error(f"{key} is {short(value)}, expected {expected}")
        return value


def rows_of(t: TensorInfo) -> int:
    return math.prod(t.shape[:-1])


def type_sizes() -> dict[int, tuple[int, int]]:
    """ggml's type number -> (numbers in a block, bytes of a block)."""
    from gguf.constants import GGML_QUANT_SIZES  # imported only for GGUF files, because it is slow

    return {int(t): size for t, size in GGML_QUANT_SIZES.items()}


def type_name(value_type: int) -> str:
    """ggml's name of a type, such as Q4_K."""
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(value_type).name
