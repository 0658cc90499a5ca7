"""docs/channels.md lists the known reply formats."""

from __future__ import annotations

import re

from doc_pages import PAGES
from logprobe.text.channels.forms import CALL_ROWS

PAGE = PAGES["channels.md"]


def test_the_table_lists_the_forms_and_which_can_be_forced() -> None:
    lines = re.findall(r"^\| `([\w.-]+)` \|.*\| (yes|no)(?:, one)? \|$", PAGE, re.MULTILINE)
    rows = {row.name: "no" if row.calls is None else "yes" for row in CALL_ROWS}
    assert dict(lines) == rows | {"thinking": "no"}
    one = re.findall(r"^\| `([\w.-]+)` \|.*\| yes, one \|$", PAGE, re.MULTILINE)
    assert set(one) == {row.name for row in CALL_ROWS if row.calls and row.calls.between is None}
