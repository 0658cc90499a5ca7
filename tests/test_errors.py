"""The error classes match the tree in the module's docstring, and can be caught as the expected builtins."""

from __future__ import annotations

import inspect
import pickle
import re
from typing import Any

import pytest

from logprobe import errors
from logprobe.errors import BatchError, LogprobeError, ParameterError, UnknownParameterError, require

CLASSES = {
    name: item for name, item in vars(errors).items() if inspect.isclass(item) and issubclass(item, Exception)
}
DRAWN = re.compile(r"^(?P<indent>[ │├└─]*)(?P<name>[A-Z]\w+)(?: \((?P<builtin>\w+)\))?", re.MULTILINE)


def drawn_tree() -> dict[str, tuple[str | None, str | None]]:
    """Return name → (parent, builtin base), parsed from the tree in the docstring."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    path: list[tuple[int, str]] = []
    drawing = (errors.__doc__ or "").split("::\n")[1].split("\n\nEach")[0]
    for line in DRAWN.finditer(drawing):
        indent, name = len(line["indent"]), line["name"]
        path = [entry for entry in path if entry[0] < indent]
        tree[name] = (path[-1][1] if path else None, line["builtin"])
        path.append((indent, name))
    return tree


def test_every_error_is_drawn_and_every_drawn_error_exists() -> None:
    assert set(drawn_tree()) == set(CLASSES)


@pytest.mark.parametrize(("name", "place"), drawn_tree().items())
def test_each_error_stands_where_it_is_drawn(name: str, place: tuple[str | None, str | None]) -> None:
    parent, builtin = place
    bases = {base.__name__ for base in CLASSES[name].__bases__}
    assert bases == {parent or "Exception"} | ({builtin} if builtin else set())


@pytest.mark.parametrize("name", CLASSES)
def test_each_error_says_what_it_means(name: str) -> None:
    assert CLASSES[name].__doc__


def test_a_parameter_error_begins_with_the_parameter() -> None:
    error = ParameterError("top_p", "must be in (0, 1], got 2")
    assert str(error) == "top_p: must be in (0, 1], got 2"


class Shown:
    """Counts how often it is formatted."""

    times = 0

    def __repr__(self) -> str:
        self.times += 1
        return "x" * 1000


def test_what_a_caller_gave_is_put_into_words_for_an_error_alone_and_shortened() -> None:
    given = Shown()
    require(True, "prompt", "must be good", got=given)
    assert given.times == 0
    with pytest.raises(ParameterError) as raised:
        require(False, "prompt", "must be good", got=given)
    assert str(raised.value) == "prompt: must be good, got " + "x" * 60


def test_an_unknown_parameter_without_a_near_one_lists_all() -> None:
    assert str(UnknownParameterError("zzz", ["b", "a"], of="Thing")).endswith("known: a, b")


def test_a_name_that_is_no_name_is_cut_and_compared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert errors.shortened("n" * 64) == "n" * 64
    assert errors.shortened("n" * 65) == "n" * 63 + "…"
    assert errors.closest("temperatur", ["temperature"], 0.7) == "temperature"
    monkeypatch.setattr(errors, "get_close_matches", None)
    assert errors.closest("n" * 65, ["n"], 0.7) is None
    error = UnknownParameterError("n" * 1000, ("temperature",), of="SamplingParams")
    assert str(error) == f"{'n' * 63}…: SamplingParams has no such parameter; known: temperature"


def test_a_batch_error_names_five_failures_and_counts_the_rest() -> None:
    failures: dict[int, LogprobeError] = {index: ParameterError("n", f"bad {index}") for index in range(7)}
    outputs: list[Any] = [None] * 9
    error = BatchError(outputs, failures)
    assert str(error).startswith("7 of 9 requests failed: request 0: n: bad 0; request 1")
    assert str(error).endswith("request 4: n: bad 4; and 2 more")
    assert error.outputs is outputs
    assert error.errors is failures


@pytest.mark.parametrize(
    "error",
    [
        LogprobeError("x"),
        ParameterError("top_p", "too large"),
        UnknownParameterError("topp", ["top_p"], of="SamplingParams"),
        errors.PromptTooLongError("prompt", "has 9 tokens"),
        errors.DownloadError("no way to the server"),
        errors.ForwardError("the step failed"),
        BatchError([1, 2], {1: ParameterError("n", "bad")}),
    ],
)
def test_errors_travel_between_processes(error: LogprobeError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - pickled here
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy).keys() == vars(error).keys()
