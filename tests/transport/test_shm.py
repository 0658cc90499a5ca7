"""Rows in shared memory: equal to those in messages, never torn or stale, and pages are reused."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from logprobe.errors import EngineError, ParameterError
from logprobe.records.rows import EXTRAS, GivenLists, HostRows, KeptLists
from logprobe.transport import codec as codecs
from logprobe.transport import shm
from logprobe.transport.codec import SHARED_BYTES, Codec, array_of, parts_of_array, parts_of_rows, rows_of
from logprobe.transport.messages import Delta
from logprobe.transport.shm import NUM_PAGES, PAGE_BYTES, PageReader, PageWriter, Span, num_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = shm.unnamed_file()
    yield descriptor
    os.close(descriptor)


def some_rows(num_rows: int, k: int, *, entropy: bool = False, given: int = 0, seed: int = 0) -> HostRows:
    random = np.random.default_rng(seed)

    def ids(*shape: int) -> Any:
        return random.integers(0, 50000, shape, dtype=np.int32)

    def floats(*shape: int) -> Any:
        return random.normal(size=shape).astype(np.float32)

    named = None
    if given:
        offsets = np.arange(num_rows + 1, dtype=np.int64) * given
        named = GivenLists(
            offsets=offsets,
            token_ids=ids(num_rows * given),
            logprobs=floats(num_rows * given),
            ranks=ids(num_rows * given),
        )
    extras = {"entropy": floats(num_rows)} if entropy else {}
    if given:
        extras["log_kept_mass"] = floats(num_rows)
    return HostRows(
        ids(num_rows, k + 1),
        floats(num_rows, k + 1),
        ids(num_rows),
        extras,
        named,
        KeptLists.of([np.arange(row % 5, dtype=np.uint16) for row in range(num_rows)]) if given else None,
    )


def assert_same(got: HostRows, want: HostRows) -> None:
    assert got.extras.keys() == want.extras.keys()
    for mine, theirs in (
        (got.token_ids, want.token_ids),
        (got.logprobs, want.logprobs),
        (got.ranks, want.ranks),
        *((got.extras[name], want.extras[name]) for name in want.extras),
    ):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert (got.given is None) == (want.given is None)
    if got.given is not None and want.given is not None:
        for mine, theirs in zip(got.given.columns(), want.given.columns(), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert (got.kept is None) == (want.kept is None)
    if got.kept is not None and want.kept is not None:
        np.testing.assert_array_equal(got.kept.offsets, want.kept.offsets)
        np.testing.assert_array_equal(got.kept.token_ids, want.kept.token_ids)


@pytest.mark.parametrize("num_rows", [1, 3, 200])
@pytest.mark.parametrize("k", [0, 20, 5000])
@pytest.mark.parametrize(("entropy", "given"), [(False, 0), (True, 0), (False, 2), (True, 5)])
def test_both_ways_give_the_same_rows(file: int, num_rows: int, k: int, entropy: bool, given: int) -> None:
    rows = some_rows(num_rows, k, entropy=entropy, given=given)
    shared: Codec[list[Delta]] = Codec(list[Delta], writer=PageWriter(file), reader=PageReader(file))
    plain: Codec[list[Delta]] = Codec(list[Delta])
    message = [Delta(request_id="r", index=2, token_ids=[7], raw=rows)]
    told = shared.encode(message)
    is_shared = num_bytes(parts_of_rows(rows)) >= SHARED_BYTES
    assert is_shared == (len(told) < 100)
    for codec, data in ((shared, told), (plain, plain.encode(message))):
        [delta] = codec.decode(data)
        assert (delta.request_id, delta.index, delta.token_ids) == ("r", 2, [7])
        assert delta.raw is not None
        assert_same(delta.raw, rows)


def test_narrow_rows_of_a_step_share_a_block_and_come_apart_as_they_were(file: int) -> None:
    kinds = [(20, False, 0), (5, False, 0), (20, True, 0), (5000, False, 0), (20, False, 2)]
    sent = [
        some_rows(1 + number % 3, k, entropy=entropy, given=given, seed=number)
        for number, (k, entropy, given) in enumerate(8 * kinds)
    ]
    message = [
        Delta(request_id=str(number), index=0, raw=rows, prompt=rows) for number, rows in enumerate(sent)
    ]
    shared: Codec[list[Delta]] = Codec(list[Delta], writer=PageWriter(file), reader=PageReader(file))
    plain: Codec[list[Delta]] = Codec(list[Delta])
    for codec in (shared, plain):
        data = codec.encode(message)
        blocks = msgspec.msgpack.decode(data)[0]
        assert len(blocks) == 3 + 2 * 2 * 8, "one for each narrow kind, one for each that is wide or named"
        for delta, rows in zip(codec.decode(data), sent, strict=True):
            assert delta.raw is not None
            assert delta.prompt is not None
            assert_same(delta.raw, rows)
            assert_same(delta.prompt, rows)


def test_rows_outside_their_block_are_refused() -> None:
    plain: Codec[list[Delta]] = Codec(list[Delta])
    blocks, told = msgspec.msgpack.decode(plain.encode([Delta(request_id="r", index=0, raw=some_rows(3, 2))]))
    assert told[0]["raw"] == [0, 0, 3]
    for place in ([0, 0, 4], [0, -1, 2], [0, 2, 1]):
        told[0]["raw"] = place
        with pytest.raises(EngineError, match="3 rows"):
            plain.decode(msgspec.msgpack.encode([blocks, told]))


def test_a_message_that_is_refused_keeps_no_pages(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "MAX_MESSAGE_BYTES", 1000)
    writer = PageWriter(file)
    codec: Codec[list[Delta]] = Codec(list[Delta], writer=writer)
    with pytest.raises(ParameterError, match="at most 1,000"):
        codec.encode([Delta(request_id="r" * 1001, index=0, raw=some_rows(1, 20000))])
    span = writer.write(parts_of_rows(some_rows(1, 20000)))
    assert span is not None
    assert span.page == 0


def test_a_whole_row_is_an_array_of_its_own(file: int) -> None:
    row = np.random.default_rng(0).normal(size=50000).astype(np.float32)
    writer = PageWriter(file)
    codec: Codec[list[Delta]] = Codec(list[Delta], writer=writer, reader=PageReader(file))
    [delta] = codec.decode(codec.encode([Delta(request_id="r", index=0, row=row)]))
    assert delta.row is not None
    np.testing.assert_array_equal(delta.row, row)
    assert not delta.row.flags.writeable
    kept = [writer.write(parts_of_array(row)) for _ in range(NUM_PAGES)]
    assert kept[0] == Span(0, 2, num_bytes(parts_of_array(row))), "the row kept no page"
    np.testing.assert_array_equal(delta.row, row)


def test_pages_come_back_with_the_last_view_in_any_order_and_what_does_not_fit_is_told(file: int) -> None:
    writer, reader = PageWriter(file), PageReader(file)
    size = PAGE_BYTES * NUM_PAGES // 4
    blocks = [parts_of_array(np.full(size // 4 - 8, number, np.float32)) for number in range(5)]
    spans = [writer.write(block) for block in blocks[:4]]
    views: list[Any] = [array_of(reader.read(span)) for span in spans if span is not None]
    assert len(views) == 4
    assert writer.write(blocks[4]) is None
    part = views[2][5:9]
    views[2] = None
    assert writer.write(blocks[4]) is None, "somebody still looks at it"
    del part
    again = writer.write(blocks[4])
    assert again is not None
    assert spans[2] is not None
    assert (again.page, again.sequence) == (spans[2].page, 5)
    assert [float(view[-1]) for view in (views[0], views[1], views[3])] == [0, 1, 3]
    assert float(array_of(reader.read(again))[0]) == 4
    assert writer.write(parts_of_array(np.zeros(NUM_PAGES * PAGE_BYTES // 4 + 1, np.float32))) is None


def test_no_former_block_and_none_half_written_is_read(file: int) -> None:
    writer, reader = PageWriter(file), PageReader(file)
    assert_no_block(reader, Span(0, 1, 8))  # no memory exists yet
    first = writer.write(parts_of_array(np.ones(4000, np.float32)))
    assert first is not None
    del first, reader
    reader = PageReader(file)
    span = Span(0, 1, 8)
    reader.read(span)
    second = writer.write(parts_of_array(np.zeros(4000, np.float32)))
    assert second is not None
    assert (second.page, second.sequence) == (0, 2), "its page was given back"
    assert_no_block(reader, span)
    pages = writer._pages
    assert pages is not None
    pages.published[0] = 0  # as during a write
    assert_no_block(reader, second)


@pytest.mark.parametrize(
    "span", [Span(-1, 1, 8), Span(NUM_PAGES, 1, 8), Span(0, 1, 0), Span(NUM_PAGES - 1, 1, PAGE_BYTES + 1)]
)
def test_a_place_outside_is_refused(file: int, span: Span) -> None:
    PageWriter(file).write(parts_of_array(np.ones(4000, np.float32)))
    assert_no_block(PageReader(file), span)


def assert_no_block(reader: PageReader, span: Span) -> None:
    with pytest.raises(EngineError, match="no block"):
        reader.read(span)


def test_where_there_is_no_memory_rows_travel_in_messages(
    file: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    codec: Codec[list[Delta]] = Codec(list[Delta], writer=PageWriter(file), reader=PageReader(file))
    rows = some_rows(8, 5000)
    with caplog.at_level(logging.WARNING, "logprobe"):
        for _ in range(2):
            [delta] = codec.decode(codec.encode([Delta(request_id="r", index=0, raw=rows)]))
            assert delta.raw is not None
            assert_same(delta.raw, rows)
    assert [record.message.count("No space left") for record in caplog.records] == [1], "told once"
    assert os.fstat(file).st_size == 0


@pytest.mark.parametrize("k", [3, 20000])
def test_a_further_column_crosses_once_the_table_names_it(
    file: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXTRAS, "novelty", np.dtype(np.float32))
    codec: Codec[list[Delta]] = Codec(list[Delta], writer=PageWriter(file), reader=PageReader(file))
    bare, entropic = some_rows(2, k), some_rows(2, k, entropy=True)
    rich = HostRows(bare.token_ids, bare.logprobs, bare.ranks, {"novelty": np.float32([0.5, np.nan])})
    sent = [bare, rich, entropic]
    deltas = codec.decode(codec.encode([Delta(request_id="r", index=0, raw=rows) for rows in sent]))
    for delta, rows in zip(deltas, sent, strict=True):
        assert delta.raw is not None
        assert_same(delta.raw, rows)


def test_nothing_is_taken_before_somebody_asks_for_wide_rows(file: int) -> None:
    codec: Codec[list[Delta]] = Codec(list[Delta], writer=PageWriter(file))
    codec.encode([Delta(request_id="r", index=0, raw=some_rows(1, 20)) for _ in range(64)])
    assert os.fstat(file).st_size == 0


def test_a_block_that_is_not_what_it_says_is_refused() -> None:
    data = np.concatenate([part.reshape(-1).view(np.uint8) for part in parts_of_rows(some_rows(2, 3))])
    for block in (data[:-8], data[:20], np.concatenate([data, data[:8]]), data[:0]):
        with pytest.raises(EngineError, match="block of"):
            rows_of(block)
    for line in ([70, 1, -1], [0, -1, -1], [0, 1, -2], [-1, 1, -1]):
        with pytest.raises(EngineError, match="array of type"):
            array_of(np.array([line], np.int64).view(np.uint8).reshape(-1))
    with pytest.raises(EngineError, match="lacks an array"):
        array_of(np.array([[-1, -1, -1]], np.int64).view(np.uint8).reshape(-1))
