from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from logprobe.errors import ParameterError
from logprobe.records import ChatEncoder, FlatLogprobs, Logprob
from logprobe.records.forms.json import legacy_rows, position_rows


class Table:
    def token_text(self, token_id: int) -> str:
        return f'"\\ü{token_id}\n'

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()


def plain_entry(token_id: int, logprob: float) -> dict[str, Any]:
    text = Table().token_text(token_id)
    number = float(logprob) if np.isfinite(logprob) else -9999.0
    return {"token": text, "logprob": number, "bytes": list(text.encode())}


@pytest.mark.parametrize("k", [0, 1, 3, 20])
@pytest.mark.parametrize("num_top", [None, 0, 2, 50])
def test_the_bytes_say_what_the_plain_twin_says(step: Any, k: int, num_top: Any) -> None:
    ids, logprobs, ranks = step(40, k, 60)
    logprobs[3, 0] = -np.inf
    ids[3, 0] = 1000
    record = FlatLogprobs()
    record.append_rows(ids, logprobs, ranks)
    content = json.loads(ChatEncoder(Table()).content(record, num_top))
    for row, entry in enumerate(content):
        best = list(zip(ids[row, 1:].tolist(), logprobs[row, 1:].tolist(), strict=True))[:num_top]
        twin = plain_entry(ids[row, 0], logprobs[row, 0])
        assert entry == {**twin, "top_logprobs": [plain_entry(*one) for one in best]}
        assert list(entry) == ["token", "bytes", "logprob", "top_logprobs"]
    assert len(content) == 40


def test_chunks_join_to_the_whole(step: Any) -> None:
    record, encoder = FlatLogprobs(), ChatEncoder(Table())
    record.append_rows(*step(23, 5, 60))
    for size in (1, 2, 7):
        chunks = [json.loads(encoder.content(record[at : at + size])) for at in range(0, 23, size)]
        assert [entry for chunk in chunks for entry in chunk] == json.loads(encoder.content(record))
    assert encoder.content(record[:0]) == b"[]"


@pytest.mark.parametrize("k", [0, 1, 3, 20, 70])
@pytest.mark.parametrize("num_top", [None, 0, 2, 50])
def test_few_rows_and_many_give_the_same_bytes(step: Any, k: int, num_top: Any) -> None:
    ids, logprobs, ranks = step(40, k, 90)
    ids[3, 0], logprobs[3, 0], ranks[3] = 1000, -np.inf, 90
    if k > 1:
        logprobs[7, -1], ids[7, 0], logprobs[7, 0], ranks[7] = -np.inf, ids[7, 1], logprobs[7, 1], 1
    record, encoder = FlatLogprobs(), ChatEncoder(Table(), floor=-123.456)
    record.append_rows(ids, logprobs, ranks)
    one_by_one = b",".join(encoder.entries(record, row, row + 1, num_top) for row in range(40))
    assert b"[" + one_by_one + b"]" == encoder.content(record, num_top)
    assert (
        one_by_one.count(b"-123.4")
        == np.isneginf(logprobs[:, : None if num_top is None else num_top + 1]).sum()
    )


@pytest.mark.parametrize("k", [0, 1, 3, 20])
@pytest.mark.parametrize("num_top", [None, 0, 2, 50])
def test_without_has_impossible_alternatives_that_are_none_are_left_out(
    step: Any, k: int, num_top: Any
) -> None:
    ids, logprobs, ranks = step(40, k, 60)
    ids[:, 0] += 1000
    ranks[:] = 90
    for row in range(40):
        logprobs[row, 1 + row % 4 :] = -np.inf  # as if a mask left fewer than k
    logprobs[3, 0] = -np.inf
    record = FlatLogprobs()
    record.append_rows(ids, logprobs, ranks)
    by_hand = FlatLogprobs([*record])  # ragged rows
    table = Table()
    whole, few = (ChatEncoder(table).content(record, num_top, has_impossible=has) for has in (True, False))
    for entry, kept in zip(json.loads(whole), json.loads(few), strict=True):
        possible = [one for one in entry["top_logprobs"] if one["logprob"] != -9999.0]
        assert kept == entry | {"top_logprobs": possible}
    for other in (record, by_hand):
        for start in (0, 13):
            one_by_one = [
                ChatEncoder(table).entries(other, row, row + 1, num_top, has_impossible=False)
                for row in range(start, 40)
            ]
            found = ChatEncoder(table).entries(other, start, 40, num_top, has_impossible=False)
            assert b",".join(one_by_one) == found
        assert ChatEncoder(table).content(other, num_top, has_impossible=False) == few
        for row in position_rows(other, table, has_impossible=False):
            assert row is not None
            assert -9999.0 not in [one["logprob"] for one in row["top_logprobs"]]
        plain, maps = (legacy_rows(other, table, has_impossible=has)["top_logprobs"] for has in (True, False))
        for row, (before, after) in enumerate(zip(plain, maps, strict=True)):
            own = table.token_text(int(ids[row, 0]))
            assert after == {text: nats for text, nats in before.items() if nats != -9999.0 or text == own}


def test_nan_is_null() -> None:
    record = FlatLogprobs([{1: Logprob(np.nan, 1)}])
    assert json.loads(ChatEncoder(Table()).content(record))[0]["logprob"] is None


@pytest.mark.parametrize(
    ("positions", "num_top", "parameter"),
    [([None], None, "record"), ([{}], None, "record"), ([], -1, "num_top")],
)
def test_what_has_no_chat_form_is_refused(positions: Any, num_top: Any, parameter: Any) -> None:
    with pytest.raises(ParameterError) as error:
        ChatEncoder(Table()).content(FlatLogprobs(positions), num_top)
    assert error.value.parameter == parameter


def test_a_position_that_stands_for_a_part_of_its_token_has_those_bytes_alone(step: Any) -> None:
    ids, logprobs, ranks = step(23, 5, 60)
    record, encoder = FlatLogprobs(), ChatEncoder(Table())
    record.append_rows(ids, logprobs, ranks)
    rows = [0, 1, 2, 3, 7, 8, 20, 21, 22]
    parts = {0: b"", 3: b"\xff", 7: b"ab", 22: b"c"}
    whole, cut = (json.loads(bytes(encoder.rows(record, rows, 2, parts=one))) for one in (None, parts))
    assert cut == [
        entry | ({"bytes": list(parts[row])} if row in parts else {})
        for row, entry in zip(rows, whole, strict=True)
    ]
    assert json.loads(bytes(encoder.rows(record, rows, 2))) == whole, "nothing was kept of it"
