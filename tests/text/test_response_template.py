"""Our reader of response templates beside transformers' own, on replies of random markers and texts."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
import regex

from logprobe.errors import ParameterError
from logprobe.text.channels.forms import CALL_ROWS, CALLS
from logprobe.text.channels.regions import Close, Open, Regions, Text
from logprobe.text.channels.response_template import load_response_template, read_field
from logprobe.text.channels.tool_types import ToolTypes

ANCHOR = {"start_anchor": "<|im_start|>assistant\n"}
KEY_VALUE = {
    "fields": {
        "content": {"content": "text", "close": ["<end>", "<end><end>"]},
        "facts": {
            "open_pattern": r"<facts (?P<kind>\w+)>",
            "close": "</facts>",
            "content": "kv-lines",
            "content_args": {"value_parser": {"name": "json", "args": {"allow_non_json": True}}},
            "transform": {"kind": "{kind}", "all": ["{content}"]},
        },
        "number": {"open": "<n>", "close": "</n>", "content": "float"},
    }
}
TEMPLATES = {row.name + str(index): {"fields": row.fields} for index, row in enumerate(CALL_ROWS)} | {
    "key-value": KEY_VALUE
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "properties": {
                    "count": {"type": "integer"},
                    "share": {"type": ["number", "null"]},
                    "exact": {"anyOf": [{"type": "boolean"}, {"type": "object"}]},
                    "where": {"type": "string"},
                    "near": {"type": "array"},
                    "none": {"type": "integer", "nullable": True},
                }
            },
        },
    }
]
VALUES = ["3", "3.0", "3.5", "true", " False", "null", "None", "[1]", '{"a": 1}', "NaN", "x y", ""]
FRAGMENTS = [
    *("text ", "\n", "<", "</", "{", "}", '{"name": "find", "arguments": {"count": "3"}}', "[]", "find"),
    *('{"count": "2"}', '{count:<|"|>2<|"|>,exact:true}', "<think>", "</think>", "<end>", "<end><end>"),
    *("count: 1\nshare: x\n", "<n>", " 2.5 ", "</n>", "functions.find", " json"),
    *(f"<parameter={key}>{value}</parameter>" for key, value in zip("ab", VALUES, strict=False)),
    *(f"<arg_key>count</arg_key><arg_value>{value}</arg_value>" for value in VALUES[:3]),
]


# Each matches an opening or closing pattern of some template.
MATCHES = [
    *("<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"),
    *("<|channel|>commentary to=functions.find <|constrain|>json<|message|>", "<facts own>"),
    *("<|tool_call>call:find", "[TOOL_CALLS]find[ARGS]", "[TOOL_CALLS]find[CALL_ID]a1[ARGS]"),
    *("<tool_call>\n<function=find>", "</function>\n</tool_call>", "<tool_call>find"),
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n",
    "<｜tool▁call▁begin｜>find<｜tool▁sep｜>",
    '<|python_tag|>{"name": "find", "arguments": {"count": "3"}}<|eot_id|>',
]


def markers_of(fields: dict[str, Any]) -> list[str]:
    """Return texts that open or close a field."""
    found = []
    for field in fields.values():
        for key in ("open", "close"):
            given = field.get(key, [])
            found += [given] if isinstance(given, str) else given
            pattern = field.get(f"{key}_pattern")
            found += [text for text in MATCHES if pattern and regex.match(pattern, text, regex.DOTALL)]
    return found


def pieces_of(generator: random.Random, markers: list[str]) -> list[str]:
    """Return a random reply, cut into pieces of a few characters each."""
    parts = (
        generator.choice(generator.choice((markers, FRAGMENTS))) for _ in range(generator.randint(1, 12))
    )
    reply = "".join(parts)
    cuts = sorted(generator.sample(range(len(reply) + 1), min(len(reply), generator.randint(0, 8))))
    return [reply[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(reply)])]


def ours(spec: dict[str, Any], pieces: list[str]) -> list[tuple[str, Any]]:
    """Return each explicit region's field and value, in order; a value that cannot be read ends the list."""
    template, types = load_response_template(spec), ToolTypes(TOOLS)
    regions = Regions(template)
    steps = [step for piece in pieces for step in regions.advance(piece)] + regions.advance("", final=True)
    whole, at = "".join(pieces), 0
    found: list[tuple[str, Any]] = []
    body, captures = "", {}
    for step in steps:
        if isinstance(step, Open):
            body, captures = "", step.captures
        elif isinstance(step, Text) and step.field not in {None, template.implicit}:
            body += whole[at : step.stop]
        elif isinstance(step, Close) and step.field is not None:
            try:
                found.append(
                    (step.field, types.typed(read_field(body, template.fields[step.field], captures)))
                )
            except (ValueError, KeyError):
                return [*found, (step.field, "cannot be read")]
        at = step.stop
    return found


def theirs(spec: dict[str, Any], pieces: list[str]) -> list[tuple[str, Any]]:
    from transformers.utils.chat_parsing import ResponseParser

    parser = ResponseParser(spec, prefix="", tools=TOOLS)
    implicit = parser._implicit_name
    found: list[tuple[str, Any]] = []
    opened = ""
    for piece in [*pieces, None]:
        try:
            events = parser.finalize()[1] if piece is None else parser.feed(piece)
        except (ValueError, KeyError):
            return [*found, "cannot be read"]  # type: ignore[list-item]
        for event in events:
            opened = event["field"] if event["type"] == "region_open" else opened
            if event["type"] == "region_close" and event["field"] != implicit:
                found.append((event["field"], event["value"]))
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_regions_and_values_equal_those_of_transformers(name: str) -> None:
    spec = {**ANCHOR, **TEMPLATES[name]}
    generator, markers = random.Random(name), markers_of(spec["fields"])  # noqa: S311 - not for secrets
    num_regions = 0
    for _ in range(300):
        pieces = pieces_of(generator, markers)
        mine, reference = ours(spec, pieces), theirs(spec, pieces)
        if reference and reference[-1] == "cannot be read":
            # Its error loses the regions of the same call before it.
            assert mine[-1][1] == "cannot be read", pieces
            assert mine[: len(reference) - 1] == reference[:-1], pieces
        else:
            assert mine == reference, pieces
        num_regions += len(mine)
    assert num_regions > 30


@pytest.mark.parametrize("value", VALUES)
def test_arguments_are_converted_as_by_transformers(value: str) -> None:
    spec = {
        **ANCHOR,
        "fields": {
            CALLS: {
                "open": "<call>",
                "close": "</call>",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>",
                    "merge_duplicates": True,
                },
                "transform": {"function": {"name": "find", "arguments": "{content}"}},
            }
        },
    }
    names = ["count", "share", "exact", "where", "near", "none", "unknown", "count"]
    reply = "".join(f"<{name}>{value}</{name}>" for name in names)
    pieces = [f"<call>{reply}</call>"]
    assert ours(spec, pieces) == theirs(spec, pieces)


INVALID = [
    ([], "must be an object"),
    ({"fields": {}}, "at least one field"),
    ({**ANCHOR, "fields": {"a": {}, "b": {}}}, "a, b"),
    ({"fields": {"a": {}}}, "start_anchor"),
    ({**ANCHOR, "fields": {"a": {}}, "version": 2}, "version 2"),
    ({**ANCHOR, "fields": {"a": {}}, "other": 1}, "unknown other"),
    ({**ANCHOR, "fields": {"a": {"opens": "x"}}}, "fields.a: unknown opens"),
    ({**ANCHOR, "fields": {"a": {"open": "x", "open_pattern": "x"}}}, "both open and open_pattern"),
    ({**ANCHOR, "fields": {"a": {"open": ["x", ""]}}}, "none of them empty"),
    ({**ANCHOR, "fields": {"a": {"open": 3}}}, "a list of texts"),
    ({**ANCHOR, "fields": {"a": {"open_pattern": "("}}}, "not a regular expression"),
    ({**ANCHOR, "fields": {"a": {"content": "yaml"}}}, "unknown content"),
    ({**ANCHOR, "fields": {"a": {"join": "x"}}}, "repeats"),
    ({**ANCHOR, "fields": {"a": {"join": 1, "repeats": True}}}, "join must be a text"),
    ({**ANCHOR, "fields": {"a": {"transform": {"b": "{content} and"}}}}, "mixes"),
    ({**ANCHOR, "fields": {"a": {"transform_each": True}}}, "transform_each"),
    ({**ANCHOR, "fields": {"a": {"open_pattern": "(?P<name>x)"}}}, "named groups name"),
]


@pytest.mark.parametrize(("spec", "reason"), INVALID, ids=[json.dumps(spec)[:60] for spec, _ in INVALID])
def test_an_invalid_template_is_refused_as_by_transformers(spec: Any, reason: str) -> None:
    from transformers.utils.chat_parsing.response_templates import load_response_template as load_theirs

    with pytest.raises(ValueError, match=r".") as refused:
        load_theirs(spec)
    assert not isinstance(refused.value, ParameterError)
    with pytest.raises(ParameterError) as caught:
        load_response_template(spec)
    assert caught.value.parameter == "response_template"
    assert reason in str(caught.value)
