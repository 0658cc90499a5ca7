"""Baseline file format: a header, blocks of next-token distributions ("rows"), and an end record with counts.

Files are untrusted: the sizes in a header are checked against limits before anything is allocated, and values
are validated before they are used in comparisons.

A file is the bytes `LPKL`, then parts. Each part begins with a JSON header, preceded by its length (4 bytes,
little-endian). The first header describes the file. The last header ends the file and has its numbers of
positions and texts. Each other header describes a block of positions. After the header of a block come, in
this order:

1. `COLUMNS`, with one value per position. Each probability p is stored as an integer c near n sqrt(p),
   rounded at random so that the mean of (c / n)^2 is p. The block's factor n is as large as the size of the
   file allows. `cross` is the sum of (c / n)^2 log p over the vocabulary. `low_logprob`, `blur`, `low_mass`
   and `distance` are for the error bounds.
2. For each text that begins in the block, three int32: its first position in the block, the token before
   it, and the index of the text.
3. The number of bits of each integer c, position by position: two numbers to a byte, compressed with
   deflate. The number 15 means that p is 0.
4. The bits of each c below its leading bit: the lowest bit of all integers, then the next bit of all, and
   so on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from logprobe.analysis.baseline.rows import (
    IMPOSSIBLE,
    MAX_SCALE,
    ROW_FACTS,
    KeptRows,
    Packed,
    kept_within,
    unpack,
)
from logprobe.analysis.io.files import reading, writing
from logprobe.errors import InputError
from logprobe.private_files import claim
from logprobe.records.forms.versions import Versioned, check_version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    import numpy.typing as npt

    from logprobe.records.values import IntArray

SUFFIX: Final = ".lpkl"
MAGIC: Final = b"LPKL"
VERSION: Final = 1
SHARE: Final = 10  # a row takes at most 1/SHARE of the bytes that it takes in llama.cpp's format
MAX_HEAD: Final = 1 << 16  # bytes of a JSON head
MAX_VOCABULARY: Final = 1 << 22
MAX_ENTRIES: Final = 1 << 24  # maximum number of entries in a block with more than one row
MAX_ROWS: Final = 256  # maximum number of rows in a block
COLUMNS: Final = {
    "token_ids": "<i4",
    "best_ids": "<i4",
    "logprobs": "<f4",
    "cross": "<f8",
    "low_logprob": "<f4",
    "blur": "<f4",
    "low_mass": "<f4",
    "distance": "<f4",
}
"""Columns with one number per row, in file order, with their dtypes."""
BYTES_A_ROW: Final = sum(np.dtype(kind).itemsize for kind in COLUMNS.values())
BYTES_A_START: Final = 12
BYTES_A_HEAD: Final = 160  # maximum size of the head of a block that we write


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First header of the file: the model that produced the rows, and the model's vocabulary."""

    version: int = VERSION
    vocabulary_size: int  # number of entries in a row
    vocabulary: str  # digest from `vocabulary_digest`
    model: str | None
    weights: str | None
    weight_version: str | None
    lora: str | None


class Block(msgspec.Struct, frozen=True, kw_only=True, tag="block"):
    """Header of a block: the number of rows, and the sizes of the data that follows."""

    num_rows: int
    num_starts: int
    scale: int
    num_length_bytes: int
    num_plane_bytes: int


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """End of the file: total numbers of rows and texts."""

    num_rows: int
    num_texts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive rows of one text, with the tokens that the rows predict."""

    text_index: int
    is_first: bool  # True for the text's first run
    context: IntArray  # all tokens of the text before `token_ids`
    token_ids: IntArray  # (M,)
    logprobs: npt.NDArray[np.float32]  # (M,) logprobs of `token_ids`, nats
    best_ids: IntArray  # (M,) the most likely token in each row
    kept: KeptRows  # M rows


def rows_a_block(vocabulary_size: int) -> int:
    """Return the maximum number of rows in a block; a whole block must fit in memory."""
    return max(min(MAX_ROWS, MAX_ENTRIES // vocabulary_size), 1)


def max_bytes(num_rows: int, vocabulary_size: int) -> int:
    """Return the maximum size in bytes of `num_rows` rows: a tenth of their size in llama.cpp's format.

    In that format a row takes 8 bytes plus 2 bytes per entry, with the number of entries rounded up to even.
    """
    return num_rows * (2 * (vocabulary_size + vocabulary_size % 2) + 8) // SHARE


class BaselineWriter:
    """Writes a baseline under a temporary name, which `finish` changes to `path` when the file is complete.

    Raises:
        InputError: the file exists, or its name does not end in `.lpkl`.
        OutputError: the file cannot be written.
    """

    def __init__(self, path: str | Path, header: Header) -> None:
        self.path = Path(path)
        if self.path.suffix != SUFFIX:
            raise InputError(f"{path}: must end in {SUFFIX}")
        if self.path.exists():
            raise InputError(f"{path}: exists; remove it, or use another name")
        self._unfinished = self.path.with_name(f"{self.path.name}.tmp")
        self._header = header
        self.num_rows = self.num_texts = 0
        with writing(self.path):
            claim(self._unfinished)
            self._file = self._unfinished.open("wb")
            self._file.write(MAGIC)
            self._put(header)

    def _put(self, head: msgspec.Struct) -> None:
        data = msgspec.json.encode(head)
        self._file.write(len(data).to_bytes(4, "little") + data)

    def write(
        self,
        rows: npt.NDArray[np.float32],
        token_ids: IntArray,
        logprobs: npt.NDArray[np.float64],
        starts: list[tuple[int, int, int]],
    ) -> None:
        """Add a block of N rows.

        Args:
            rows: (N, V) log-probabilities, in nats.
            token_ids: (N,) tokens of the text at the rows' positions.
            logprobs: (N,) logprobs of `token_ids`, in nats.
            starts: for each text that begins in the block: the index of its first row, the token before that
                row, and the index of the text.
        """
        size = self._header.vocabulary_size
        limit = max_bytes(len(rows), size)
        own = len(rows) * BYTES_A_ROW + len(starts) * BYTES_A_START + BYTES_A_HEAD
        # With a vocabulary of a few hundred tokens, the columns alone take most of the limit. The rows then
        # get half of the limit, and the block exceeds the limit.
        kept, packed = kept_within(rows, max(limit - own, limit // 2), self.num_rows)
        columns: dict[str, Any] = {
            "token_ids": token_ids,
            "best_ids": rows.argmax(axis=1),
            "logprobs": logprobs,
        }
        columns |= {name: getattr(kept, name) for name in COLUMNS if name not in columns}
        with writing(self.path):
            self._put(
                Block(
                    num_rows=len(rows),
                    num_starts=len(starts),
                    scale=kept.scale,
                    num_length_bytes=len(packed.lengths),
                    num_plane_bytes=len(packed.planes),
                )
            )
            for name, kind in COLUMNS.items():
                self._file.write(np.asarray(columns[name]).astype(kind).tobytes())
            self._file.write(np.array(starts, "<i4").reshape(-1, 3).tobytes())
            self._file.write(packed.lengths + packed.planes)
        self.num_rows += len(rows)
        self.num_texts += len(starts)

    def finish(self) -> None:
        """Complete the file, flush it to disk, and rename it to `path`."""
        with writing(self.path):
            self._put(End(num_rows=self.num_rows, num_texts=self.num_texts))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._unfinished.replace(self.path)

    def leave(self) -> None:
        """Close and delete the unfinished file."""
        self._file.close()
        self._unfinished.unlink(missing_ok=True)


# -- reading -------------------------------------------------------------------------------------------------


class BaselineReader:
    """Reads a baseline sequentially; the constructor reads the `header`.

    Raises:
        InputError: the file does not exist, is not a baseline, or has an unsupported version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with reading(path):
            self._file: BinaryIO = self.path.open("rb")
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read_header(self) -> Header:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise InputError(
                f"{self.path}: is not a baseline; write one with `logprobe compare MODEL --save`"
            )
        head = self._head()
        check_version(self._decoded(head, Versioned).version, VERSION, self.path)
        header: Header = self._decoded(head, Header)
        self._require(1 <= header.vocabulary_size <= MAX_VOCABULARY, "invalid vocabulary size")
        return header

    def runs(self) -> Iterator[Run]:
        """Yield all rows in order; a run has rows of one text and of one block.

        Raises:
            InputError: the file is truncated or inconsistent.
        """
        num_rows = num_texts = 0
        before, text = np.empty(0, np.int32), -1
        while isinstance(head := self._decoded(self._head(), Block | End), Block):
            columns, starts, kept = self._block(head)
            bounds = [*starts[:, 0].tolist(), head.num_rows]
            self._require(num_rows or bounds[0] == 0, "the first row has no text")
            firsts: list[tuple[int, int] | None] = [(first, index) for _, first, index in starts.tolist()]
            if bounds[0] > 0:
                bounds, firsts = [0, *bounds], [None, *firsts]
            for first, (start, stop) in zip(firsts, pairwise(bounds), strict=True):
                if first is not None:
                    self._require(first[1] > text, "the texts are not in order")
                    before, text = np.array(first[:1], np.int32), first[1]
                yield Run(
                    text_index=text,
                    is_first=first is not None,
                    context=before,
                    token_ids=columns["token_ids"][start:stop],
                    logprobs=columns["logprobs"][start:stop],
                    best_ids=columns["best_ids"][start:stop],
                    kept=kept[start:stop],
                )
                before = np.concatenate([before, columns["token_ids"][start:stop]])
            num_rows, num_texts = num_rows + head.num_rows, num_texts + len(starts)
        self._require(
            (head.num_rows, head.num_texts) == (num_rows, num_texts), "wrong counts in the end record"
        )
        self._require(not self._file.read(1), "data after the end record")

    def _block(self, head: Block) -> tuple[dict[str, Any], IntArray, KeptRows]:
        num_rows, size = head.num_rows, self.header.vocabulary_size
        self._require(1 <= num_rows <= rows_a_block(size), "invalid number of rows in a block")
        self._require(0 <= head.num_starts <= num_rows, "invalid number of texts in a block")
        self._require(1 <= head.scale <= MAX_SCALE, "invalid scale")
        most = 2 * num_rows * size + 1024  # bytes of the codes: 14 bits per entry, plus deflate's overhead
        num_bytes = (head.num_length_bytes, head.num_plane_bytes)
        self._require(min(num_bytes) >= 0 and sum(num_bytes) <= most, "invalid size of codes")
        columns = {name: self._array(kind, num_rows) for name, kind in COLUMNS.items()}
        starts = self._array("<i4", 3 * head.num_starts).reshape(-1, 3)
        self._check(columns, starts, num_rows)
        packed = Packed(*(self._bytes(count) for count in num_bytes))
        try:
            codes = unpack(packed, num_rows, size)
        except InputError as error:
            raise InputError(f"{self.path}: {error}; write it again") from error
        self._require((codes[codes != IMPOSSIBLE] <= head.scale + 1).all(), "a code exceeds its scale")
        facts = {name: columns[name] for name in ROW_FACTS}
        return columns, starts, KeptRows(scale=head.scale, codes=codes, **facts)

    def _check(self, columns: dict[str, Any], starts: IntArray, num_rows: int) -> None:
        size = self.header.vocabulary_size
        for ids in (columns["token_ids"], columns["best_ids"], starts[:, 1]):
            self._require(((ids >= 0) & (ids < size)).all(), "a token id is outside the vocabulary")
        places = starts[:, 0]
        is_rising = (places[1:] > places[:-1]).all() and ((places >= 0) & (places < num_rows)).all()
        self._require(is_rising, "the texts are not in order")
        self._require((columns["logprobs"] <= 1e-3).all(), "a logprob is positive or NaN")
        for name in ROW_FACTS:
            self._require(np.isfinite(columns[name]).all(), f"{name} has a value that is not finite")
        for name in ("blur", "low_mass", "distance"):
            self._require((columns[name] >= 0).all(), f"{name} has a negative value")

    def _head(self) -> bytes:
        num_bytes = int.from_bytes(self._bytes(4), "little")
        self._require(num_bytes <= MAX_HEAD, "invalid length of a head")
        return self._bytes(num_bytes)

    def _decoded(self, data: bytes, kind: Any) -> Any:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(
                f"{self.path}: a header cannot be read ({error}); write the file again"
            ) from error

    def _array(self, kind: str, count: int) -> Any:
        return np.frombuffer(self._bytes(count * np.dtype(kind).itemsize), kind)

    def _bytes(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise InputError(f"{self.path}: is truncated; write it again")
        return data

    def _require(self, is_so: object, message: str) -> None:
        if not is_so:
            raise InputError(f"{self.path}: is damaged ({message}); write it again")
