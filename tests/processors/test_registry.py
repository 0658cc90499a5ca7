from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from logprobe.config import EngineConfig
from logprobe.errors import ParameterError
from logprobe.processors import (
    LogitBiasLogitsProcessor,
    LogitsProcessor,
    available_processors,
    describe_processor,
    load_processor,
)
from logprobe.processors.registry import (
    BUILT_INS,
    ENTRY_POINT_GROUP,
    built_in_with,
    load_processors,
    make_processor,
)

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
from logprobe.processors import LogitsProcessor
class Good(LogitsProcessor):
    '''Does nothing.

    More words.
    '''
    def __init__(self, config): pass
    def apply(self, logits): return logits
class Unfinished(LogitsProcessor):
    def __init__(self, config): pass
class Other: pass
class BadArgs(Good):
    Args = dict
function = print
import msgspec
class Lost(msgspec.Struct):
    x: "Nowhere"
class BadTypes(Good):
    Args = Lost
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_processors.py").write_text(SOURCE)
    (tmp_path / "broken_processors.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "some_processors", raising=False)
    return "some_processors"


def test_a_built_in_a_path_and_a_class_each_name_a_class(module: str) -> None:
    assert load_processor("LogitBiasLogitsProcessor") is LogitBiasLogitsProcessor
    assert load_processor(LogitBiasLogitsProcessor) is LogitBiasLogitsProcessor
    good = load_processor(f"{module}:Good")
    assert good.__name__ == "Good"
    assert list(load_processors([f"{module}:Good", "PenaltiesLogitsProcessor"])) == [
        "Good",
        "PenaltiesLogitsProcessor",
    ]


def test_an_entry_point_is_found_by_its_name(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints(
        [
            EntryPoint("good", f"{module}:Good", ENTRY_POINT_GROUP),
            EntryPoint("gone", "nowhere:Gone", ENTRY_POINT_GROUP),
        ]
    )
    monkeypatch.setattr(
        "logprobe.processors.registry.entry_points", lambda *, group: points.select(group=group)
    )
    assert available_processors() == [*BUILT_INS, "gone", "good"]
    assert load_processor("good").__name__ == "Good"
    with pytest.raises(ParameterError, match="entry point 'gone' cannot be loaded"):
        load_processor("gone")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("LogitBias", "no processor 'LogitBias'; known: LogitBiasLogitsProcessor, "),
        ("nowhere_at_all:Good", "cannot import 'nowhere_at_all'"),
        ("broken_processors:Good", "cannot import 'broken_processors': ZeroDivisionError"),
        ("some_processors:Missing", "module 'some_processors' has no 'Missing'"),
        ("some_processors:Other", "is not a subclass of logprobe.processors.LogitsProcessor"),
        ("some_processors:function", "is not a subclass"),
        ("some_processors:Unfinished", "does not define apply"),
        ("some_processors:BadArgs", "Args must be a msgspec.Struct class"),
        ("some_processors:BadTypes", "the types of its Args cannot be read: name 'Nowhere' is not defined"),
        (":Good", "malformed; write module.path:ClassName"),
        ("some_processors:", "malformed"),
        ("some_processors:Good:Bad", "malformed"),
        (int, "is not a subclass"),
        (3, "is not a subclass"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(module: str, given: Any, message: str) -> None:
    del module
    with pytest.raises(ParameterError) as raised:
        load_processor(given)
    assert message in str(raised.value)
    assert raised.value.parameter == "logits_processors"


def test_a_class_named_twice_is_refused(module: str) -> None:
    with pytest.raises(ParameterError, match="Good is registered twice"):
        load_processors([f"{module}:Good", load_processor(f"{module}:Good")])


def test_a_description_holds_name_first_paragraph_and_schema(module: str) -> None:
    assert describe_processor(f"{module}:Good") == {"name": "Good", "doc": "Does nothing.", "args": None}
    bias = describe_processor("LogitBiasLogitsProcessor")
    assert bias["args"]["properties"]["logit_bias"]["additionalProperties"] == {"type": "number"}


@pytest.mark.parametrize("name", BUILT_INS)
def test_every_built_in_has_a_schema_that_accepts_its_defaults(name: str) -> None:
    import jsonschema

    described = describe_processor(name)
    jsonschema.Draft202012Validator.check_schema(described["args"])
    kind = load_processor(name).Args
    assert kind is not None
    jsonschema.validate(msgspec.to_builtins(kind()), described["args"])
    assert described["doc"]


def test_the_owner_of_an_argument_is_known() -> None:
    assert built_in_with("thinking_budget") == "ThinkingBudgetLogitsProcessor"
    assert built_in_with("nothing") is None


def test_the_interface_asks_for_a_constructor_and_apply() -> None:
    assert LogitsProcessor.__abstractmethods__ == {"__init__", "apply"}


@pytest.mark.parametrize(
    ("init", "takes_config"),
    [
        (lambda self, config: setattr(self, "given", config), True),
        (lambda self, *args: setattr(self, "given", *args), True),
        (lambda self, config=None: setattr(self, "given", config), True),
        (lambda self: setattr(self, "given", None), False),
        (lambda self, size=3: setattr(self, "given", None if size == 3 else size), False),
        (lambda self, *, size=3: setattr(self, "given", None if size == 3 else size), False),
        (lambda self, **more: setattr(self, "given", more.get("config")), False),
    ],
)
def test_only_an_init_that_asks_for_the_configuration_is_given_it(
    module: str, init: Any, takes_config: bool
) -> None:
    kind = type("Made", (load_processor(f"{module}:Good"),), {"__init__": init})
    config = EngineConfig()
    assert make_processor(kind, config).given is (config if takes_config else None)
