"""Blocks of rows in memory that two processes share: written once, read in place.

One file without a name a process pair, cut into pages. Its writer puts a block into free pages and then
publishes it under a sequence number that no other block has; the message that names the pages and the number
is all that travels. The reader gives the pages back once nobody looks at them any more, in whatever order
readers get ready, so that a slow one holds its own pages and no others. Where none are free, rows travel in
messages. The file has no name, so nothing is left of it once both processes are gone, however they ended.

Before it: blocks of an engine process. After it: arrays that lie in these pages.
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
"""Contiguous arrays that lie one after another in a block."""

logger = logging.getLogger("logprobe")

PAGE_BYTES: Final = 1 << 14
NUM_PAGES: Final = 1 << 12
TABLE_BYTES: Final = 8 * NUM_PAGES  # of uint64, one a page
FILE_BYTES: Final = 2 * TABLE_BYTES + NUM_PAGES * PAGE_BYTES  # sequence numbers published, and released


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Where a block lies."""

    page: int  # the first
    sequence: int  # under which it was published
    num_bytes: int


def num_bytes(parts: Parts) -> int:
    """The size of the block that holds these."""
    return sum(part.nbytes for part in parts)


def unnamed_file() -> int:
    """A file in memory that is known by its descriptor alone, still of size 0."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("logprobe-rows", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class PageWriter:
    """The side that writes; the memory is taken when the first block comes. One thread at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pages: _Pages | None = None
        self._is_refused = False
        self._sequence = 0
        self._held: list[tuple[int, int, int]] = []  # first page, the one after the last, sequence number

    def write(self, parts: Parts) -> Span | None:
        """Put a block into free pages; None where there is no room, or no such memory."""
        pages, size = self._open(), num_bytes(parts)
        if pages is None or (page := self._take_pages(pages, -(-size // PAGE_BYTES))) is None:
            return None
        pages.published[page] = 0  # whoever reads by an old number sees that the block is not his any more
        at = pages.start_of(page)
        for part in parts:
            pages.whole[at : at + part.nbytes] = part.reshape(-1).view(np.uint8)
            at += part.nbytes
        pages.published[page] = self._sequence
        return Span(page, self._sequence, size)

    def take_back(self, span: Span) -> None:
        """Free the pages of a block that no message will name."""
        assert self._pages is not None
        self._pages.released[span.page] = span.sequence

    def _open(self) -> _Pages | None:
        if self._pages is None and not self._is_refused:
            try:
                if hasattr(os, "posix_fallocate"):  # else a full memory would end whoever writes
                    os.posix_fallocate(self._descriptor, 0, FILE_BYTES)
                os.ftruncate(self._descriptor, FILE_BYTES)
                self._pages = _Pages(self._descriptor)
            except OSError as error:
                self._is_refused = True
                logger.warning("no shared memory for rows (%s): they travel in messages", error)
        return self._pages

    def _take_pages(self, pages: _Pages, count: int) -> int | None:
        """The first of `count` free pages in a row, after taking back what was released."""
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
    """The side that reads; any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pages: _Pages | None = None

    def read(self, span: Span) -> Array:
        """A block as (num_bytes,) uint8, read-only, in place; its pages are given back with the last view.

        Raises:
            EngineError: there is no such block.
        """
        is_inside = 0 <= span.page < NUM_PAGES and 0 < span.num_bytes <= (NUM_PAGES - span.page) * PAGE_BYTES
        if self._pages is None and is_inside and os.fstat(self._descriptor).st_size == FILE_BYTES:
            self._pages = _Pages(self._descriptor)
        pages = self._pages
        if not is_inside or pages is None or pages.published[span.page] != span.sequence:
            raise EngineError(f"shared memory holds no block {span}; please report this")
        return np.asarray(_Lease(pages, span))


class _Pages:
    """The file in this process's memory."""

    def __init__(self, descriptor: int) -> None:
        memory = mmap.mmap(descriptor, FILE_BYTES)
        self.published = memoryview(memory)[:TABLE_BYTES].cast("Q")  # faster than NumPy for single numbers
        self.released = memoryview(memory)[TABLE_BYTES : 2 * TABLE_BYTES].cast("Q")
        self.whole = np.frombuffer(memory, np.uint8)
        self.address = self.whole.ctypes.data

    @staticmethod
    def start_of(page: int) -> int:
        """Where a page begins in the file."""
        return 2 * TABLE_BYTES + page * PAGE_BYTES


class _Lease:
    """What arrays on a block stand on: it goes with the last of them."""

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
