"""transformers' response parser, extended to report where the fields of a reply and their markers are.

The text of a field, between its markers, is called a region. The parser emits steps that cover the text
without gaps, up to the point where the parse is certain. It does not build a message: the caller parses the
contents of the regions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from transformers.utils.chat_parsing import ResponseParser

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BLOCK_CHARS: Final = 256  # fed at a time, since each pattern searches from a marker to the end of the buffer
KEPT_CHARS: Final = 256  # kept before the current position for lookbehind assertions in patterns
MAX_PASSED_CHARS: Final = 2048


class Text(NamedTuple):
    """Text up to `stop` in the region of `field`; if `field` is None, text that the template discards."""

    field: str | None
    stop: int


class Open(NamedTuple):
    """A marker up to `stop` that opens the region of `field`, with the groups that its pattern captured."""

    field: str
    stop: int
    captures: dict[str, str]


class Close(NamedTuple):
    """A marker up to `stop` that closes the region of `field`; if `field` is None, no explicit region."""

    field: str | None
    stop: int


Step: TypeAlias = Text | Open | Close


class Regions(ResponseParser):
    """Incremental parser of a growing text; positions are character indices."""

    def __init__(self, template: Any, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._steps: list[Step] = []
        self._num_passed = 0  # characters dropped from the buffer
        super().__init__(template, prefix="", tools=[dict(tool) for tool in tools])

    @property
    def field(self) -> str | None:
        """Name of the field whose region is open at the end of the text so far."""
        return self._current

    def advance(self, text: str, *, final: bool = False) -> list[Step]:
        """Add text and return the steps that are now certain; with `final`, all remaining steps."""
        for start in range(0, len(text), BLOCK_CHARS):
            self._buffer += text[start : start + BLOCK_CHARS]
            self._process([], eos=False)
            self._let_go()
        if final:
            self._process([], eos=True)
        steps, self._steps = self._steps, []
        return steps

    def typed(self, value: Any) -> Any:
        """Return a parsed call with string arguments converted to the types in the tool's schema."""
        return self._coerce_tool_calls(value)

    def _let_go(self) -> None:
        num_passed = self._pos - KEPT_CHARS
        if num_passed > MAX_PASSED_CHARS:
            self._buffer = self._buffer[num_passed:]
            self._pos -= num_passed
            self._num_passed += num_passed

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        del events
        if text:  # the text starts at `_pos`
            self._opened = self._current is not None
            self._steps.append(Text(self._current, self._num_passed + self._pos + len(text)))

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        del events
        self._steps.pop()  # drop the implicit Close: this marker does not belong to the previous region
        self._current, self._opened = field.name, True
        captures = {name: text for name, text in m.groupdict().items() if text is not None}
        self._steps.append(Open(field.name, self._num_passed + m.end(), captures))

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        del events
        ended = None if self._current == self._implicit_name else self._current
        self._steps.append(Close(ended, self._num_passed + self._pos))
        self._reset_to_implicit()
