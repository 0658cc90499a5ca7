"""transformers' parser of replies, told where in the text its regions and their marks lie.

It gives what it finds as steps that cover the text without a gap, as far as that is decided. Its own message
is not built: what a region holds is read by whoever follows the steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from transformers.utils.chat_parsing import ResponseParser

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BLOCK_CHARS: Final = 256  # shown at a time: each pattern is sought from one mark to the end of what was shown
KEPT_CHARS: Final = 256  # before the place that was reached: patterns may look back
MAX_PASSED_CHARS: Final = 2048


class Text(NamedTuple):
    """Text of a field's region up to a place; a field of None: text that the template takes for nothing."""

    field: str | None
    stop: int


class Open(NamedTuple):
    """A mark up to a place, which opens the region of a field, and what its pattern captured."""

    field: str
    stop: int
    captures: dict[str, str]


class Close(NamedTuple):
    """A mark up to a place, which ends the region of a field; a field of None: it ends none."""

    field: str | None
    stop: int


Step: TypeAlias = Text | Open | Close


class Regions(ResponseParser):
    """Follows a text that grows; places are characters of it."""

    def __init__(self, template: Any, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._steps: list[Step] = []
        self._num_passed = 0  # characters that were let go
        super().__init__(template, prefix="", tools=[dict(tool) for tool in tools])

    @property
    def field(self) -> str | None:
        """The field whose region is open."""
        return self._current

    def advance(self, text: str, *, final: bool = False) -> list[Step]:
        """What became certain with more of the text."""
        for start in range(0, len(text), BLOCK_CHARS):
            self._buffer += text[start : start + BLOCK_CHARS]
            self._process([], eos=False)
            self._let_go()
        if final:
            self._process([], eos=True)
        steps, self._steps = self._steps, []
        return steps

    def typed(self, value: Any) -> Any:
        """A call with those of its arguments that are texts as the types that its tool's schema says."""
        return self._coerce_tool_calls(value)

    def _let_go(self) -> None:
        num_passed = self._pos - KEPT_CHARS
        if num_passed > MAX_PASSED_CHARS:
            self._buffer = self._buffer[num_passed:]
            self._pos -= num_passed
            self._num_passed += num_passed

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        del events
        if text:  # it begins at `_pos`
            self._opened = self._current is not None
            self._steps.append(Text(self._current, self._num_passed + self._pos + len(text)))

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        del events
        self._steps.pop()  # the end of the region before it: this mark is no mark of that one
        self._current, self._opened = field.name, True
        captures = {name: text for name, text in m.groupdict().items() if text is not None}
        self._steps.append(Open(field.name, self._num_passed + m.end(), captures))

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        del events
        ended = None if self._current == self._implicit_name else self._current
        self._steps.append(Close(ended, self._num_passed + self._pos))
        self._reset_to_implicit()
