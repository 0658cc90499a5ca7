"""Incremental parser of replies: finds the markers of a response template and the text of each field.

The text of a field, between its markers, is called a region. The parser emits steps that cover the text
without gaps, up to the point where the parse is certain. It does not build a message: the caller reads the
contents of the regions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

    import regex

    from logprobe.text.channels.response_template import Marker, ResponseTemplate

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
    """A marker or end of text at `stop` that closes the region of `field`; None: of the implicit field."""

    field: str | None
    stop: int


Step: TypeAlias = Text | Open | Close


class _Found(NamedTuple):
    """A marker in the buffer."""

    field: str
    is_open: bool
    match: regex.Match[str]

    @property
    def rank(self) -> tuple[int, int, bool, str]:
        """Sort key: the first marker wins, then the longest one, then one that opens a field."""
        start, stop = self.match.span()
        return start, start - stop, not self.is_open, self.field


class Regions:
    """Parses a growing text; positions in steps are character indices from the start of the text."""

    def __init__(self, template: ResponseTemplate) -> None:
        self._template = template
        self._buffer = ""  # the end of the text
        self._num_passed = 0  # characters before the buffer
        self._position = 0  # in the buffer; everything before it is covered by steps
        self._steps: list[Step] = []
        self.field = template.implicit
        """Name of the field whose region is open at the end of the text so far."""
        self._has_text = False  # the open region has text, or an opening marker

    def advance(self, text: str, *, final: bool = False) -> list[Step]:
        """Add text and return the steps that are now certain; with `final`, all remaining steps."""
        for start in range(0, len(text), BLOCK_CHARS):
            self._buffer += text[start : start + BLOCK_CHARS]
            self._parse(final=False)
            self._drop_passed()
        if final:
            self._parse(final=True)
        steps, self._steps = self._steps, []
        return steps

    def _parse(self, *, final: bool) -> None:
        while True:
            found, certain = self._next_marker(final=final)
            if found is None:
                self._text_to(certain)
                if final:
                    self._close()
                return
            start, stop = found.match.span()
            self._text_to(start)
            self._position = stop
            if found.is_open:
                captures = {name: text for name, text in found.match.groupdict().items() if text is not None}
                self.field, self._has_text = found.field, True
                self._steps.append(Open(found.field, self._num_passed + stop, captures))
            else:
                is_progress = self._has_text or start < stop
                self._close()
                if not is_progress:  # an empty match would be found here again
                    return

    def _next_marker(self, *, final: bool) -> tuple[_Found | None, int]:
        """Return the next marker, or None, and the position up to which text can be emitted.

        A marker that more text could complete, extend or replace is not returned, and the text from its start
        on is held back, unless the text is final.
        """
        best: _Found | None = None
        held = len(self._buffer)
        for field, is_open, marker in self._expected():
            match = marker.pattern.search(self._buffer, self._position, partial=not final)
            if match is None:
                continue
            if not final and (match.partial or self._may_change(marker, match)):
                held = min(held, match.start())
                continue
            found = _Found(field, is_open, match)
            if best is None or found.rank < best.rank:
                best = found
        if best is not None and best.match.start() >= held:
            best = None
        return best, held

    def _expected(self) -> Iterator[tuple[str, bool, Marker]]:
        """Yield the markers that may come next, each with its field and True if it opens the field."""
        fields, implicit = self._template.fields, self._template.implicit
        if self.field == implicit:
            for name, field in fields.items():
                if field.open is not None:
                    yield name, True, field.open
        if self.field is not None and (closing := fields[self.field].close) is not None:
            yield self.field, False, closing

    def _may_change(self, marker: Marker, match: regex.Match[str]) -> bool:
        """Return True if a complete match may end elsewhere once there is more text."""
        is_at_end = match.end() == len(self._buffer)
        return is_at_end and (marker.may_grow or match.start() == match.end())

    def _text_to(self, stop: int) -> None:
        if stop > self._position:
            self._position, self._has_text = stop, self.field is not None
            self._steps.append(Text(self.field, self._num_passed + stop))

    def _close(self) -> None:
        """Close the open region at the current position; text after it belongs to the implicit field."""
        implicit = self._template.implicit
        ended = None if self.field == implicit else self.field
        self._steps.append(Close(ended, self._num_passed + self._position))
        self.field, self._has_text = implicit, False

    def _drop_passed(self) -> None:
        num_passed = self._position - KEPT_CHARS
        if num_passed > MAX_PASSED_CHARS:
            self._buffer = self._buffer[num_passed:]
            self._position -= num_passed
            self._num_passed += num_passed
