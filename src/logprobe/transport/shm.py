"""Shared memory between two processes, for blocks of rows that are written once and read in place.

Each pair of processes shares one anonymous file, divided into pages. The writer puts a block into free
pages and publishes the block under a unique sequence number; the message contains only the first page and
the number. The reader releases a block's pages when the last view of the block is gone. Blocks may be
released in any order, so that a slow reader only keeps its own pages in use. If no pages are free, rows are
sent in messages. The file has no name, so the kernel frees it when both processes have ended, even after a
crash.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import numpy as np

from logprobe.errors import EngineError

if TYPE_CHECKING:
    from logprobe.records.store.columns import Array

Parts: TypeAlias = "list[Array]"
"""Contiguous arrays, which are stored one after another in a block."""

logger = logging.getLogger("logprobe")

PAGE_BYTES: Final = 1 << 14
NUM_PAGES: Final = 1 << 12
TABLE_BYTES: Final = 8 * NUM_PAGES  # one uint64 per page
# The file has two tables of sequence numbers, for published and released blocks, and then the pages.
FILE_BYTES: Final = 2 * TABLE_BYTES + NUM_PAGES * PAGE_BYTES


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Location of a block in shared memory."""

    page: int  # first page
    sequence: int  # sequence number of the block
    num_bytes: int


def num_bytes(parts: Parts) -> int:
    """Return the size in bytes of a block with these arrays."""
    return sum(part.nbytes for part in parts)


def unnamed_file() -> int:
    """Create an empty anonymous file, in memory if possible, and return its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("logprobe-rows", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class PageWriter:
    """Writes shared blocks; the memory is allocated at the first write. Not thread-safe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pages: _Pages | None = None
        self._is_refused = False
        self._sequence = 0
        self._held: list[tuple[int, int, int]] = []  # (first page, end page, sequence number)

    def write(self, parts: Parts) -> Span | None:
        """Write a block into free pages; return None if there are too few, or there is no shared memory."""
        pages, size = self._open(), num_bytes(parts)
        if pages is None or (page := self._take_pages(pages, -(-size // PAGE_BYTES))) is None:
            return None
        pages.published[page] = 0  # invalidates the old sequence number while the block is written
        at = pages.start_of(page)
        for part in parts:
            pages.whole[at : at + part.nbytes] = part.reshape(-1).view(np.uint8)
            at += part.nbytes
        pages.published[page] = self._sequence
        return Span(page, self._sequence, size)

    def take_back(self, span: Span) -> None:
        """Free the pages of a block that was written but will not be sent."""
        assert self._pages is not None
        self._pages.released[span.page] = span.sequence

    def _open(self) -> _Pages | None:
        if self._pages is None and not self._is_refused:
            try:
                # Without the allocation, a write would raise SIGBUS when memory is full.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._descriptor, 0, FILE_BYTES)
                os.ftruncate(self._descriptor, FILE_BYTES)
                self._pages = _Pages(self._descriptor)
            except OSError as error:
                self._is_refused = True
                logger.warning("cannot allocate shared memory for rows (%s); sending them in messages", error)
        return self._pages

    def _take_pages(self, pages: _Pages, count: int) -> int | None:
        """Reclaim released pages, then reserve `count` consecutive pages; return the first, or None."""
        released = pages.released
        self._held = [held for held in self._held if released[held[0]] != held[2]]
        page = 0
        for index, (start, stop, _) in enumerate([*self._held, (NUM_PAGES, NUM_PAGES, 0)]):
            if start - page >= count:
                self._sequence += 1
                self._held.insert(index, (page, page + count, self._sequence))
                return page
            page = stop
        return None


class PageReader:
    """Reads shared blocks; thread-safe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pages: _Pages | None = None

    def read(self, span: Span) -> Array:
        """Return a block as a read-only view, (num_bytes,) uint8; the last view releases the pages.

        Raises:
            EngineError: there is no block with this location and sequence number.
        """
        is_inside = 0 <= span.page < NUM_PAGES and 0 < span.num_bytes <= (NUM_PAGES - span.page) * PAGE_BYTES
        if self._pages is None and is_inside and os.fstat(self._descriptor).st_size == FILE_BYTES:
            self._pages = _Pages(self._descriptor)
        pages = self._pages
        if not is_inside or pages is None or pages.published[span.page] != span.sequence:
            raise EngineError(f"shared memory holds no block {span}; please report this")
        return np.asarray(_Lease(pages, span))


class _Pages:
    """The shared file, mapped into this process."""

    def __init__(self, descriptor: int) -> None:
        memory = mmap.mmap(descriptor, FILE_BYTES)
        self.published = memoryview(memory)[:TABLE_BYTES].cast("Q")  # faster than NumPy for single numbers
        self.released = memoryview(memory)[TABLE_BYTES : 2 * TABLE_BYTES].cast("Q")
        self.whole = np.frombuffer(memory, np.uint8)
        self.address = self.whole.ctypes.data

    @staticmethod
    def start_of(page: int) -> int:
        """Return the byte offset of a page in the file."""
        return 2 * TABLE_BYTES + page * PAGE_BYTES


class _Lease:
    """Base object of arrays over a block, which releases the pages when the last array is gone."""

    __slots__ = ("__array_interface__", "_pages", "_span")

    def __init__(self, pages: _Pages, span: Span) -> None:
        self._pages, self._span = pages, span
        is_read_only = True
        self.__array_interface__ = {
            "version": 3,
            "shape": (span.num_bytes,),
            "typestr": "|u1",
            "data": (pages.address + pages.start_of(span.page), is_read_only),
        }

    def __del__(self) -> None:
        self._pages.released[self._span.page] = self._span.sequence
