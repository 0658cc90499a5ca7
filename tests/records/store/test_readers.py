"""A reader that is stopped at any point while the writer continues."""

from __future__ import annotations

import sys
from itertools import repeat
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.records import FlatLogprobs
from logprobe.records.store import columns, rows

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_LINES = 60  # minimum of the store's lines that a reader executes


def stopped_at(number: int, read: Callable[[], Any], go_on: Callable[[], None]) -> Any:
    """Return the result of `read`, calling `go_on` before the store's line with this number."""
    num_lines = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename not in {columns.__file__, rows.__file__}:
            return None
        if event == "line":
            num_lines += 1
            if num_lines == number:
                sys.settrace(None)
                go_on()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return read()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("read", [list, lambda record: record.arrays.token_ids.tolist()])
@pytest.mark.parametrize("number", range(1, NUM_LINES, 2))
def test_a_reader_that_is_stopped_reads_what_was_there(
    number: int, read: Callable[[FlatLogprobs], Any], step: Any
) -> None:
    record, ids, logprobs, ranks = FlatLogprobs(), *step(8, 3, 40)

    def write(row: int) -> None:
        texts = ["a", "b", None, "d"] if row == 6 else repeat(None)
        if row in {2, 7}:
            record.append_fast(ids[row].tolist(), logprobs[row].tolist(), [1, 1, 2, 3], texts)
        elif row == 4:
            record.append(None)
        else:
            record.append_rows(ids[row : row + 1], logprobs[row : row + 1], ranks[row : row + 1])

    def go_on() -> None:
        for row in (4, 5, 6, 7):
            write(row)

    for row in range(4):
        write(row)
    before = read(record)
    found = stopped_at(number, lambda: read(record), go_on)
    assert found[: len(before)] == before
    assert found == read(record)[: len(found)]
