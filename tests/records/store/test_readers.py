"""Readers of one record beside each other, one stopped while another goes on."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.records import FlatLogprobs
from logprobe.records.store import rectangle
from logprobe.records.store.rectangle import Rectangle

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_LINES = 240  # of the store, more or less, that the reader runs


def stopped_at(number: int, read: Callable[[], Any], go_on: Callable[[], None]) -> Any:
    """What `read` gives, `go_on` called before the store's line of that number that it runs."""
    num_lines = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename != rectangle.__file__:
            return None
        if event == "line":
            num_lines += 1
            if num_lines == number:
                go_on()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return read()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("number", range(3, NUM_LINES, 3))
def test_a_reader_that_has_counted_less_disturbs_no_other(
    number: int, step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, same = FlatLogprobs(), FlatLogprobs()
    for _ in range(6):  # in several blocks
        arrays = step(400, 3, 40)
        record.append_rows(*arrays)
        same.append_rows(*arrays)
    is_counting, may_go_on, widths = threading.Event(), threading.Event(), Rectangle.widths

    def slow_widths(self: Rectangle, start: int, stop: int) -> Any:
        if threading.current_thread() is early:
            is_counting.set()
            may_go_on.wait(60)
        return widths(self, start, stop)

    def let_early_finish() -> None:
        may_go_on.set()
        early.join()

    monkeypatch.setattr(Rectangle, "widths", slow_widths)
    early = threading.Thread(target=lambda: record.rows.first_entry(900))
    early.start()
    assert is_counting.wait(60)
    try:
        count = stopped_at(number, lambda: record.rows.first_entry(len(record)), let_early_finish)
    finally:
        let_early_finish()
    assert count == same.num_entries
