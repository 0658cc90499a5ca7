from __future__ import annotations

import tracemalloc
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from logprobe.errors import ParameterError
from logprobe.records import FlatLogprobs, Logprob


@pytest.mark.parametrize("k", [0, 1, 2, 5, 19, 20, 21, 70, 300])
@pytest.mark.parametrize("num_levels", [None, 4])
def test_rows_from_a_step_read_as_the_plain_twin(
    step: Any, as_dicts: Any, k: int, num_levels: int | None
) -> None:
    flat, plain = FlatLogprobs(), []
    for n in (1, 1, 3, 200, 1, 64, 1):
        arrays = step(n, k, 300, num_levels=num_levels)
        flat.append_rows(*arrays)
        plain += as_dicts(*arrays)
    assert list(flat) == plain
    assert [list(position) for position in flat] == [list(position) for position in plain]
    assert flat == plain
    assert plain == flat
    assert flat[::-1] == plain[::-1]
    assert flat[7:250:9] == plain[7:250:9]
    assert flat[250:7:-9] == plain[250:7:-9]


@pytest.mark.parametrize("k", [1, 20, 40])
def test_one_row_at_a_time_equals_one_call(step: Any, k: int) -> None:
    arrays = step(700, k, 500, num_levels=9)
    whole, single = FlatLogprobs(), FlatLogprobs()
    whole.append_rows(*arrays)
    for row in range(700):
        single.append_rows(*(column[row : row + 1] for column in arrays))
    assert whole == single
    assert whole.token_ids == single.token_ids
    assert whole.nbytes == single.nbytes


def test_columns_show_the_chosen_token_first_and_the_best_by_rank() -> None:
    flat = FlatLogprobs()
    flat.append_rows([[30, 10, 20, 30]], [[-2.0, -0.5, -1.5, -2.0]], [3])
    flat.append_rows([[99, 10, 20, 30]], [[-9.0, -0.5, -1.5, -2.0]], [41])
    assert flat.token_ids == [30, 10, 20, 99, 10, 20, 30]
    assert flat.logprobs == [-2.0, -0.5, -1.5, -9.0, -0.5, -1.5, -2.0]
    assert flat.ranks == [3, 1, 2, 41, 1, 2, 3]
    assert flat.start_indices == [0, 3]
    assert flat.end_indices == [3, 7]
    assert flat.decoded_tokens == [None] * 7
    assert repr(flat.token_ids) == "[30, 10, 20, 99, 10, 20, 30]"
    assert flat.token_ids[1:4] == [10, 20, 99]
    assert flat.token_ids[-1] == 30
    assert flat.ranks[::-2] == [3, 1, 2, 3]
    assert flat.chosen(1) == (99, Logprob(-9.0, 41))


def test_a_token_beyond_the_best_is_not_one_of_them_after_wider_rows() -> None:
    flat = FlatLogprobs()
    flat.append_rows([[99, 10, 20, 30]], [[-9.0, -0.5, -1.5, -2.0]], [41])
    position = {7: Logprob(-8.0, 40), 10: Logprob(-0.5, 1), 20: Logprob(-1.5, 2)}
    flat.append(position)
    assert flat[1] == position
    assert flat.top_entries().token_ids.tolist() == [10, 20, 30, 10, 20]


def test_positions_of_alternating_widths_are_read_as_they_were_given() -> None:
    flat = FlatLogprobs()
    kinds = ({5: Logprob(-1.0, 1)}, {6: Logprob(-1.0, 3), 5: Logprob(-0.5, 1)})
    rows = [kinds[place % 2] for place in range(600)]
    for row in rows:
        flat.append(row)
    assert list(flat) == rows


def test_a_none_position_comes_back_as_none_and_holds_no_entries(step: Any, as_dicts: Any) -> None:
    arrays = step(30, 20, 100)
    flat = FlatLogprobs([None])
    flat.append_rows(*arrays)
    plain = [None, *as_dicts(*arrays)]
    assert flat == plain
    assert flat.start_indices[:2] == [0, 0]
    assert flat.chosen(0) is None
    for places in (
        slice(None),
        slice(0, 1),
        slice(0, 5),
        slice(1, 5),
        slice(4, None, -1),
        slice(None, None, 3),
    ):
        assert flat[places] == plain[places]
    flat.append(None)
    assert flat == [*plain, None]


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 3), (10, 10), (5, 2)])
def test_an_empty_slice_is_an_empty_container_that_can_grow(step: Any, start: int, stop: int) -> None:
    flat = FlatLogprobs()
    flat.append_rows(*step(6, 3, 50))
    part = flat[start:stop]
    assert len(part) == 0
    assert part == []
    assert part.token_ids == part.start_indices == []
    part.append({1: Logprob(-1.0, 1)})
    assert part == [{1: Logprob(-1.0, 1)}]


def test_a_slice_shares_memory_and_grows_apart(step: Any, as_dicts: Any) -> None:
    arrays = step(900, 20, 100)
    flat = FlatLogprobs()
    flat.append_rows(*arrays)
    plain = as_dicts(*arrays)
    tracemalloc.start()
    part = flat[100:700]
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < part.nbytes / 2  # only the last block's logprobs are copied
    more = step(1, 20, 100)
    part.append_rows(*more)
    flat.append_rows(*arrays)
    assert part == plain[100:700] + as_dicts(*more)
    assert flat == plain + plain
    assert part.start_indices[0] == 0
    assert part.num_entries == sum(len(position) for position in part)


def test_a_slice_with_a_step_holds_no_gap_data(step: Any) -> None:
    flat = FlatLogprobs()
    flat.append_rows(*step(300, 20, 100))
    part = flat[::3]
    assert part.num_entries == len(part.token_ids) == sum(len(position) for position in part)
    assert part.nbytes < flat.nbytes / 2.9


@pytest.mark.parametrize("index", [0, -1, np.int64(2), np.uint8(1), True])
def test_an_index_may_be_any_integer(step: Any, as_dicts: Any, index: Any) -> None:
    arrays = step(3, 2, 9)
    flat = FlatLogprobs()
    flat.append_rows(*arrays)
    assert flat[index] == as_dicts(*arrays)[int(index)]


@pytest.mark.parametrize("index", [3, -4, 1.0, "0"])
def test_a_wrong_index_raises(step: Any, index: Any) -> None:
    flat = FlatLogprobs()
    flat.append_rows(*step(3, 2, 9))
    with pytest.raises((IndexError, TypeError)):
        flat[index]


@pytest.mark.parametrize(
    "change",
    [
        lambda flat: flat.__setitem__(0, {}),
        lambda flat: flat.__delitem__(0),
        lambda flat: flat.insert(0, {}),
        lambda flat: flat.pop(),
        lambda flat: flat.reverse(),
        lambda flat: flat.remove({}),
        lambda flat: flat.clear(),
    ],
)
@pytest.mark.parametrize("length", [0, 2])
def test_what_is_there_cannot_be_changed(change: Any, length: int) -> None:
    flat = FlatLogprobs([{1: Logprob(-1.0, 1)}] * length)
    with pytest.raises(TypeError, match="append-only"):
        change(flat)
    assert len(flat) == length


def test_joining_keeps_both_sides(step: Any, as_dicts: Any) -> None:
    first, second = step(5, 20, 60), step(7, 20, 60)
    one, two = FlatLogprobs([None]), FlatLogprobs()
    one.append_rows(*first)
    two.append_rows(*second)
    plain = [None, *as_dicts(*first), *as_dicts(*second)]
    assert one + two == plain
    assert len(one) == 6
    assert two + repeat(None, 1) == [*as_dicts(*second), None]
    one += two
    assert one == plain
    one.extend(one)
    assert one == plain + plain


@pytest.mark.parametrize(
    ("ids", "dtype_bytes"), [([65_535], 2), ([65_536], 4), ([2**31 - 1], 4), ([2**31], 8), ([2**40], 8)]
)
def test_ids_of_any_size_are_kept_in_the_narrowest_type(ids: list[int], dtype_bytes: int) -> None:
    flat = FlatLogprobs([{3: Logprob(-0.5, 1)}])
    for token_id in ids:
        flat.append_rows([[token_id]], [[-1.0]], [1])
    assert flat.token_ids == [3, *ids]
    assert flat.nbytes == 2 * (dtype_bytes + 4 + 2)  # id, value, rank


@pytest.mark.parametrize("value", [-np.inf, -1e-45, -3.4e38, 0.0, -0.1, 1.5, 1e-9, -1e300])
def test_a_value_comes_back_exactly(value: float) -> None:
    flat = FlatLogprobs()
    flat.append_fast([4, 5], [value, -np.inf], [1, 1], repeat(None))
    flat.append({6: Logprob(value, 2)})
    flat.append_rows([[4, 5]], [[value, -np.inf]], [1])
    assert flat.logprobs == [value, -np.inf, value, value, -np.inf]


def test_zero_never_reads_as_minus_zero() -> None:
    flat = FlatLogprobs()
    flat.append_rows([[1, 1, 2]], [[0.0, 0.0, -np.inf]], [1])
    flat.append_rows([[1, 1, 2]] * 2, [[-0.0, -0.0, -np.inf]] * 2, [1, 1])
    assert "-0.0" not in repr(flat.logprobs)


def test_nan_is_kept_and_flagged() -> None:
    flat = FlatLogprobs()
    flat.append_rows([[1, 2]], [[-1.0, -2.0]], [1])
    flat.append_rows([[1, 2]], [[np.nan, -2.0]], [1])
    flat.append({})
    assert np.isnan(flat.logprobs[2])
    assert flat.is_valid.tolist() == [True, False, True]
    assert flat[:1].is_valid.tolist() == [True]


@pytest.mark.parametrize(
    "add",
    [
        lambda flat: flat.append({1: Logprob(np.inf, 1)}),
        lambda flat: flat.append_fast([1], [np.inf], [1], [None]),
        lambda flat: flat.append_rows([[1, 2]], [[-1.0, np.inf]], [1]),
        lambda flat: flat.append_rows([[1, 2]] * 2, [[-1.0, np.inf]] * 2, [1, 1]),
        lambda flat: flat.append_rows([[-1, 2]], [[-1.0, -1.0]], [1]),
        lambda flat: flat.append_rows(np.int32([[-1, 2]] * 2), np.float32([[-1.0, -1.0]] * 2), [1, 1]),
        lambda flat: flat.append_rows(np.int32([[1, 2]] * 2), np.float32([[-1.0, -1.0]] * 2), [1, -1]),
        lambda flat: flat.append_rows(np.int32([[1, 1]] * 2), np.float32([[-1.0, -1.0]] * 2), [1, -1]),
        lambda flat: flat.append_rows([[1, 2]], [[-1.0, -1.0]], [-1]),
        lambda flat: flat.append_rows([[1, 2]], [[-1.0]], [1]),
        lambda flat: flat.append_rows([[1.0, 2.0]], [[-1.0, -1.0]], [1]),
        lambda flat: flat.append_rows([1, 2], [-1.0, -1.0], [1]),
        lambda flat: flat.append_rows([[1, 2]], [[-1.0, -1.0]], [1], entropy=[1.0, 2.0]),
        lambda flat: flat.append_rows([[1, 2]], [[-1.0, -1.0]], [1], given=([0, 2], [1], [-1.0], [1])),
        lambda flat: flat.append_rows([[1, 2]], [[-1.0, -1.0]], [1], given=([0], [], [], [])),
        lambda flat: flat.append_fast([1, 2], [-1.0], [1, 1], [None, None]),
        lambda flat: flat.append_fast([1], [-1.0], [-2], [None]),
    ],
)
def test_bad_input_is_refused_and_adds_nothing(add: Any) -> None:
    flat = FlatLogprobs()
    flat.append_rows([[1, 2]], [[-1.0, -2.0]], [1])
    with pytest.raises(ParameterError):
        add(flat)
    assert flat == [{1: Logprob(-1.0, 1), 2: Logprob(-2.0, 1)}]
    flat.append_rows([[1, 2]], [[-1.0, -2.0]], [1])
    assert len(flat) == 2


def test_what_does_not_pack_is_kept_all_the_same() -> None:
    """A rank that contradicts the position, a different value, a repeated column."""
    flat = FlatLogprobs()
    flat.append_rows([[7, 7, 8]], [[-1.0, -1.0, -1.0]], [2])
    flat.append_rows([[7, 7, 8]], [[-1.5, -1.0, -1.25]], [1])
    flat.append_rows([[9, 7, 8]], [[-1.5, -1.0, -1.25]], [2**40])
    flat.append_rows([[9, 7, 8]], [[-1.5, -1.0, -1.25]], [0])
    assert flat.ranks == [2, 2, 1, 2, 2**40, 1, 2, 0, 1, 2]
    assert flat.logprobs[2:4] == [-1.5, -1.25]


def test_rows_of_no_width_are_empty_dicts_not_none() -> None:
    flat = FlatLogprobs([{}, None, {}])
    flat.append_fast([], [], [], [])
    assert flat == [{}, None, {}, {}]
    assert flat.end_indices == [0, 0, 0, 0]


def test_entropy_and_given_ids_stand_beside_their_positions(step: Any) -> None:
    flat = FlatLogprobs([None])
    flat.append_rows(*step(2, 3, 40))
    assert flat.entropy is None
    assert flat.given is None
    flat.append_rows(
        *step(2, 3, 40),
        entropy=[1.5, 0.25],
        given=([0, 2, 3], [5, 6, 7], [-5.0, -6.0, -7.0], [30, 31, 32]),
    )
    flat.append_rows(*step(1, 3, 40))
    np.testing.assert_array_equal(flat.entropy, np.float32([np.nan, np.nan, np.nan, 1.5, 0.25, np.nan]))
    expected = [None, None, None, {5: Logprob(-5.0, 30), 6: Logprob(-6.0, 31)}, {7: Logprob(-7.0, 32)}, None]
    assert flat.given == expected
    part = flat[4:2:-1]
    assert part.given == expected[4:2:-1]
    np.testing.assert_array_equal(part.entropy, np.float32([0.25, 1.5]))
    joined = FlatLogprobs()
    joined.extend(flat)
    assert joined.given == expected
    np.testing.assert_array_equal(joined.entropy, flat.entropy)


class Table:
    def token_text(self, token_id: int) -> str:
        return f"t{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        return b"t%d" % token_id


def test_texts_come_from_the_table_on_access_and_given_ones_win() -> None:
    flat = FlatLogprobs()
    flat.append_rows([[3, 4]], [[-1.0, -0.5]], [2])
    assert flat.decoded_tokens == [None, None]
    named = flat.with_table(Table())
    assert named.decoded_tokens == ["t3", "t4"]
    assert named[0] == {3: Logprob(-1.0, 2, "t3"), 4: Logprob(-0.5, 1, "t4")}
    assert named.chosen(0) == (3, Logprob(-1.0, 2, "t3"))
    assert named[:1].decoded_tokens == ["t3", "t4"]
    named.append_fast([5, 6], [-1.0, -2.0], [1, 1], ["", None])
    assert named.decoded_tokens == ["t3", "t4", "", "t6"]
    assert flat.decoded_tokens == [None, None]


def repeats(flat: FlatLogprobs) -> list[bool]:
    """Return for each position whether a token occurs twice."""
    spans = zip(flat.start_indices, flat.end_indices, strict=True)
    ids = list(flat.token_ids)
    return [len(set(ids[start:stop])) < stop - start for start, stop in spans]


def test_three_hundred_random_steps_agree_with_a_list_of_dicts(
    rng: np.random.Generator, step: Any, as_dicts: Any
) -> None:
    flat, plain = FlatLogprobs(), []

    def some_position() -> dict[int, Logprob] | None:
        if rng.random() < 0.2:
            return None
        ids = rng.integers(0, 2 ** int(rng.integers(4, 41)), rng.integers(0, 5)).tolist()
        ranks = [None if rng.random() < 0.3 else int(rank) for rank in rng.integers(0, 50, len(ids))]
        texts = [None if rng.random() < 0.5 else f"<{token_id}>" for token_id in ids]
        return {
            token_id: Logprob(-float(rng.exponential()), rank, text)
            for token_id, rank, text in zip(ids, ranks, texts, strict=True)
        }

    for _ in range(300):
        action = rng.integers(0, 8)
        if action >= 6:
            ids, logprobs, ranks = step(1, 3, 30)
            texts = [None if rng.random() < 0.3 else f"<{token_id}>" for token_id in ids[0].tolist()]
            columns = (ids[0].tolist(), logprobs[0].tolist(), [int(ranks[0]), 1, 2, 3], texts)
            flat.append_fast(*columns)
            plain.append(dict(zip(columns[0], map(Logprob, *columns[1:]), strict=True)))
        elif action == 0:
            positions = [some_position() for _ in range(rng.integers(0, 4))]
            flat.extend(positions)
            plain.extend(positions)
        elif action in {1, 2}:
            arrays = step(int(rng.integers(0, 5)), int(rng.integers(0, 4)), 30, num_levels=3)
            flat.append_rows(*arrays)
            plain += as_dicts(*arrays)
        elif action == 3:
            start, stop = sorted(rng.integers(-5, len(plain) + 3, 2).tolist())
            flat += flat[start:stop][:3]
            plain += plain[start:stop][:3]
        elif action == 4 and len(plain) > 40:
            places = slice(int(rng.integers(-30, 30)), None, int(rng.choice([-2, -1, 1, 2, 3])))
            assert flat[places] == plain[places]
            flat, plain = flat[places], plain[places]
        else:
            position = some_position()
            flat.append(position)
            plain.append(position)
        assert len(flat) == len(plain)
        assert flat[-3:] == plain[-3:]
    assert flat == plain
    assert list(flat) == plain
    assert np.diff([0, *flat.end_indices]).tolist() == [
        len(position or ()) + (1 if is_repeated else 0)
        for position, is_repeated in zip(plain, repeats(flat), strict=True)
    ]


def test_memory_that_was_never_written_is_never_read(
    step: Any, as_dicts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = np.empty

    def poisoned(shape: Any, dtype: Any = float) -> Any:
        array = empty(shape, dtype)
        if array.dtype == np.float32:
            array.reshape(-1).view(np.uint32)[:] = 0x7FA0_0000  # a signaling NaN, so that casting it warns
        return array

    arrays, record = step(3, 20, 90), FlatLogprobs()
    record.append_rows(*arrays)
    monkeypatch.setattr(np, "empty", poisoned)
    for token_id in (7, 2**41):  # the first makes the store ragged, the second widens its columns
        record.append({token_id: Logprob(np.float32(-0.3).item() if token_id == 7 else -0.3, 1, None)})
    assert record[:3] == as_dicts(*arrays)
    assert record[4] == {2**41: Logprob(-0.3, 1, None)}


@pytest.mark.parametrize("places", [slice(1, 3, -1), slice(-9, None, -1), slice(3, 1), slice(9, 2, 2)])
def test_a_slice_of_no_positions_is_empty(places: slice, step: Any) -> None:
    flat = FlatLogprobs()
    flat.append_rows(*step(4, 3, 40), entropy=[1.0, 2.0, 3.0, 4.0], given=([0] * 5, [], [], []))
    part = flat[places]
    assert len(part) == part.num_entries == len(part.given or ()) == len(part.extras["entropy"]) == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("column", range(3))
def test_a_number_that_raises_leaves_no_part_of_its_row(error: type[BaseException], column: int) -> None:
    class Raising:
        def __float__(self) -> float:
            raise error

        __index__ = __int__ = __float__

    flat = FlatLogprobs()
    columns: list[list[Any]] = [[7, 8], [-1.0, -2.0], [3, 1], ["a", "b"]]
    flat.append_fast(*columns)
    wrong: list[list[Any]] = [[5, 6], [-3.0, -4.0], [2, 1], ["c", "d"]]
    wrong[column][0] = Raising()
    with pytest.raises(error):
        flat.append_fast(*wrong)
    assert len(flat) == 1
    flat.append_fast(*columns)
    assert flat == [{7: Logprob(-1.0, 3, "a"), 8: Logprob(-2.0, 1, "b")}] * 2
