"""Malformed bytes give one error without large allocations, or decode to a usable record."""

from __future__ import annotations

import dataclasses
import resource
from itertools import repeat
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import fuzz
from logprobe.errors import InputError
from logprobe.records import FlatLogprobs, Logprob
from logprobe.records.forms.wire import ALIGNMENT, MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable

MANY = 10**15


def honest() -> dict[str, FlatLogprobs]:
    """Return a valid record of each form."""
    packed = FlatLogprobs([None])
    packed.append_rows([[1, 2, 3], [9, 4, 5]], [[-3.0, -0.5, -1.0], [-4.0, -0.5, -1.0]], [3, 7])
    side = FlatLogprobs([None])
    side.append_rows([[1, 1]], [[-0.5, -0.5]], [1], entropy=[1.5], given=([0, 1], [7], [-3.0], [4]))
    kept = FlatLogprobs()
    kept.append_rows([[1, 1]], [[-0.5, -0.5]], [1], log_kept_mass=[-0.1], kept=([0, 2], [1, 9]))
    fast = FlatLogprobs()
    fast.append_fast([7, 7, 8], [-1.0, -1.0, -1.25], [3, 1, 2], repeat(None))
    odd = FlatLogprobs([{}, {2**40: Logprob(-0.1, None, "ü")}, None, {3: Logprob(-np.inf, 2, "")}])
    texts = FlatLogprobs()
    for text in "ab":
        texts.append({1: Logprob(-1.0, 1, text), 2: Logprob(-2.0, 2, "c")})
    return {
        "packed": packed,
        "no rows of some width": packed[0:0],
        "side": side,
        "kept": kept,
        "fast": fast,
        "odd": odd,
        "texts": texts,
        "later texts": texts[1:],
        "nothing": FlatLogprobs(),
    }


HONEST = honest()
DATA = {kind: record.to_bytes() for kind, record in HONEST.items()}


def use(record: FlatLogprobs) -> None:
    """Read everything in a record through every method."""
    assert len(list(record)) == len(record)
    for read in (record.chosen_entries, record.top_entries):
        read()
    for name in (
        *(field.name for field in dataclasses.fields(record)),
        "arrays",
        "other_logprob",
        "outside_top_logprob",
        "entropy",
        "given",
        "nbytes",
        "num_entries",
        "info",
        "kept",
        "log_kept_mass",
    ):
        getattr(record, name)
    list(record[::-1])
    assert len(FlatLogprobs.from_bytes(record.to_bytes())) == len(record)
    record.append({3: Logprob(-1.0, 1)})
    assert list(record[-1:])


def parts_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Split bytes into header and columns."""
    stop = 8 + int.from_bytes(data[4:8], "little")
    return msgspec.json.decode(data[8:stop]), data[stop:]


def joined(header: dict[str, Any], body: bytes) -> bytes:
    """Join what `parts_of` split."""
    head = msgspec.json.encode(header)
    head += b" " * (-(8 + len(head)) % ALIGNMENT)
    return MAGIC + len(head).to_bytes(4, "little") + head + body


def check_ends_well(data: bytes) -> None:
    try:
        record = FlatLogprobs.from_bytes(data)
    except InputError:
        return
    use(record)


# -- regressions --------------------------------------------------------------------------------------------


def place_of(header: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a column's name, type, shape and offset."""
    return {place["name"]: place for place in header["columns"]}[name]


def column(name: str, /, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: place_of(header, name).update(changes)


def rows(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["rows"].update(changes)


ALTERED: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "rows that take no bytes": ("packed", rows(num_rows=MANY, num_none=MANY - 2)),
    "more None than rows": ("packed", rows(num_none=9)),
    "fewer rows than nothing": ("packed", rows(num_rows=-1, num_none=-3)),
    "more rows than columns": ("packed", rows(num_rows=200)),
    "another width": ("packed", rows(k=MANY)),
    "a width of no rows": ("no rows of some width", column("token_ids", shape=[0, MANY])),
    "a width below nothing": ("packed", rows(k=-2)),
    "a shape of all the rest": ("packed", column("ranks", shape=[-1])),
    "a shape beyond 64 bits": ("packed", column("ranks", shape=[2**40, 2**40])),
    "a shape of nothing": ("packed", column("ranks", shape=[])),
    "a start before the columns": ("packed", column("ranks", offset=-8)),
    "a start between": ("packed", column("ranks", offset=1)),
    "a start beyond 64 bits": ("packed", column("ranks", offset=2**70)),
    "objects": ("packed", column("token_ids", dtype="|O")),
    "fields": ("packed", column("token_ids", dtype="<f4,<f4")),
    "times": ("packed", column("ranks", dtype="<m8")),
    "another type": ("packed", column("logprobs", dtype="<u2")),
    "a column twice": ("packed", lambda header: header["columns"].append(header["columns"][0])),
    "a column too few": ("packed", lambda header: header["columns"].pop()),
    "an unknown column": ("packed", column("ranks", name="ranques")),
    "more None than flags": ("odd", rows(num_none=3)),
    "no texts": ("texts", rows(texts=[])),
    "texts too few": ("texts", rows(texts=["a"])),
    "texts of fewer entries": ("texts", column("texts", shape=[1])),
    "texts of nothing": ("packed", rows(texts=["a"])),
    "no named ids": ("side", lambda header: header.pop("given")),
    "named ids of other rows": ("side", lambda header: header["given"].update(num_rows=1, num_none=0)),
    "kept ids of other rows": ("kept", column("kept.offsets", shape=[1])),
    "fewer kept ids": ("kept", column("kept.token_ids", shape=[1])),
    "entropy of another length": ("side", column("entropy", shape=[1])),
}


@pytest.mark.parametrize("name", ALTERED)
def test_a_header_that_contradicts_its_columns_is_refused(name: str) -> None:
    kind, alter = ALTERED[name]
    header, body = parts_of(DATA[kind])
    alter(header)
    with pytest.raises(InputError):
        FlatLogprobs.from_bytes(joined(header, body))


VALUES: dict[str, tuple[str, str, bytes]] = {
    "a rank below nothing": ("odd", "ranks", b"\xfe\xff\xff\xff"),
    "an id below nothing": ("odd", "token_ids", b"\xff" * 8),
    "rows that go back": ("odd", "ends", (9).to_bytes(2, "little")),
    "kept ids that go back": ("kept", "kept.offsets", (1).to_bytes(8, "little")),
    "a flag that is none": ("odd", "is_none", b"\x02"),
    "a row that is None and not": ("odd", "is_none", b"\0\1\0\0"),
    "a text that is not there": ("texts", "texts", (99).to_bytes(2, "little")),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_point_at_nothing_are_refused(name: str) -> None:
    kind, column_name, value = VALUES[name]
    header, body = parts_of(DATA[kind])
    place = place_of(header, column_name)
    altered = bytearray(body)
    altered[place["offset"] : place["offset"] + len(value)] = value
    with pytest.raises(InputError):
        FlatLogprobs.from_bytes(joined(header, bytes(altered)))


def test_a_scale_of_no_numbers_is_refused() -> None:
    header, body = parts_of(HONEST["packed"].to_bytes("uint8"))
    place = place_of(header, "logprobs.scale")
    for value in (np.nan, np.inf, -1.0):
        altered = bytearray(body)
        altered[place["offset"] : place["offset"] + 4] = np.float32(value).tobytes()
        with pytest.raises(InputError, match="scale"):
            FlatLogprobs.from_bytes(joined(header, bytes(altered)))


def test_a_nan_that_signals_is_an_ordinary_one() -> None:
    header, body = parts_of(DATA["odd"])
    place = place_of(header, "logprobs")
    assert place["dtype"] == "<f8"
    column("logprobs", dtype="<f4")(header)
    altered = bytearray(body)
    altered[place["offset"] : place["offset"] + 4] = b"\x01\0\x80\x7f"
    record = FlatLogprobs.from_bytes(joined(header, bytes(altered)))
    use(record)  # fails on warnings, which are errors here
    assert np.isnan(record.logprobs[0])


@pytest.mark.parametrize(
    "head", [b'{"a":"\xff"}', b"[" * 100_000, b'{"version":1,"x":' + b"[" * 50_000, b"null"]
)
def test_a_header_that_is_none_is_refused(head: bytes) -> None:
    with pytest.raises(InputError):
        FlatLogprobs.from_bytes(MAGIC + len(head).to_bytes(4, "little") + head)


@pytest.mark.parametrize("version", [0, 2, 3])
def test_another_version_is_refused(version: int) -> None:
    header, body = parts_of(DATA["packed"])
    header["version"] = version
    with pytest.raises(InputError):
        FlatLogprobs.from_bytes(joined(header, body))


def test_many_positions_without_entries_travel_still() -> None:
    record = FlatLogprobs([None] * ((1 << 20) + 1))
    record.append_rows([[1, 2]], [[-1.0, -0.5]], [2], given=([0, 1], [7], [-3.0], [4]))
    back = FlatLogprobs.from_bytes(record.to_bytes())
    assert len(back) == len(back.given or ()) == len(record)
    assert back[-1] == record[-1]
    assert (back.given or [None])[-1] == {7: Logprob(-3.0, 4)}


# -- fuzzing ------------------------------------------------------------------------------------------------

ALTERATION = st.tuples(
    st.integers(0, 4000), st.sampled_from(["set", "cut", "put", "end"]), st.binary(min_size=1, max_size=8)
)


@pytest.mark.fuzz
@fuzz(4)
@given(
    data=st.builds(
        lambda kind, precision: HONEST[kind].to_bytes(precision),
        st.sampled_from(sorted(HONEST)),
        st.sampled_from(["float32", "float16", "uint8"]),
    ),
    alterations=st.lists(ALTERATION, min_size=1, max_size=4),
)
def test_altered_bytes_end_well(data: bytes, alterations: list[tuple[int, str, bytes]]) -> None:
    altered = bytearray(data)
    for number, how, value in alterations:
        place = number % max(len(altered), 1)
        length = {"set": len(value), "cut": len(value), "put": 0, "end": len(altered)}[how]
        altered[place : place + length] = value if how in {"set", "put"} else b""
    check_ends_well(bytes(altered))


COUNT = st.one_of(st.integers(-3, 300), st.sampled_from([2**31, 2**32, 2**63, 2**64, MANY, -(2**63)]))
NAMES = sorted({place["name"] for data in DATA.values() for place in parts_of(data)[0]["columns"]})
DTYPES = ["<u2", "<i4", "<i8", "<f4", "<f8", "<f2", "|u1", "|b1", "|O", ">f4", "<U9", "<c8", "x"]


SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "num_rows": COUNT,
    "num_none": COUNT,
    "k": COUNT,
    "repeats_chosen": st.booleans(),
    "texts": st.lists(st.none() | st.text(max_size=2), max_size=4),
}


@st.composite
def altered_header(draw: Any) -> bytes:
    header, body = parts_of(DATA[draw(st.sampled_from(sorted(DATA)))])
    for _ in range(draw(st.integers(1, 3))):
        store = draw(st.sampled_from([one for one in (header["rows"], header.get("given")) if one]))
        if header["columns"] and draw(st.booleans()):
            place = draw(st.sampled_from(header["columns"]))
            change = {
                "name": st.sampled_from(NAMES),
                "dtype": st.sampled_from(DTYPES),
                "shape": st.lists(COUNT, max_size=3),
                "offset": COUNT,
            }
            name = draw(st.sampled_from(sorted(change)))
            place[name] = draw(change[name])
        else:
            name = draw(st.sampled_from(sorted(SCALARS)))
            store[name] = draw(SCALARS[name])
    return joined(header, body)


@pytest.mark.fuzz
@fuzz(4)
@given(data=altered_header())
def test_altered_headers_end_well(data: bytes) -> None:
    check_ends_well(data)


def test_a_dishonest_record_asks_for_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind, alter in ALTERED.values():
        header, body = parts_of(DATA[kind])
        alter(header)
        with pytest.raises(InputError):
            FlatLogprobs.from_bytes(joined(header, body))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 14  # KiB
