from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logprobe.processors.registry import BUILT_INS

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_list_gives_every_name_that_can_be_registered_with_its_schema(cli: Callable[..., Any]) -> None:
    done = cli("processors", "list", "--json")
    found = json.loads(done.out)
    assert done.code == 0
    assert [one["name"] for one in found][: len(BUILT_INS)] == list(BUILT_INS)
    assert all(one["doc"] and one["args"]["type"] == "object" for one in found[: len(BUILT_INS)])
    lines = cli("processors", "list").out.splitlines()
    assert lines[0] == "LogitBiasLogitsProcessor (logit_bias)"
    assert lines[1].startswith("    Adds `logit_bias`")


def test_list_describes_a_processor_by_its_place(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    (one,) = json.loads(cli("processors", "list", "say_it_again:SayItAgainLogitsProcessor", "--json").out)
    assert one["name"] == "SayItAgainLogitsProcessor"
    assert one["args"]["properties"] == {"again_bias": {"type": "number", "default": 0.0}}


def test_an_unknown_name_is_one_line_and_exit_code_1(cli: Callable[..., Any]) -> None:
    done = cli("processors", "list", "Nothing")
    assert done.code == 1
    assert done.error_line.startswith("logits_processors: no processor 'Nothing'; known: LogitBias")
