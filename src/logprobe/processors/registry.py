"""Resolve processor classes given as built-in names, `module:Class`, classes or entry points."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logprobe.errors import ParameterError, require
from logprobe.processors import styles
from logprobe.processors.arguments import keys_of
from logprobe.processors.interface import LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logprobe.config import EngineConfig

ENTRY_POINT_GROUP: Final = "logprobe.logits_processors"
BUILT_INS: Final = (
    "LogitBiasLogitsProcessor",
    "AllowedTokensLogitsProcessor",
    "BannedWordsLogitsProcessor",
    "MinTokensLogitsProcessor",
    "PenaltiesLogitsProcessor",
    "ThinkingBudgetLogitsProcessor",
    "GrammarLogitsProcessor",
    "CaptureLogitsProcessor",
    "GlobalLogprobsCapture",
)
_BUILT_IN_HOME: Final = "logprobe.processors.builtin."
_WHERE: Final = "logits_processors"


def available_processors() -> list[str]:
    """Return the names of all processors that can be registered: built-ins, then installed entry points."""
    return [*BUILT_INS, *sorted(entry_points(group=ENTRY_POINT_GROUP).names - set(BUILT_INS))]


def load_processor(given: str | type) -> type[LogitsProcessor]:
    """Return the processor class for a built-in name, `module.path:ClassName`, entry point or class.

    Raises:
        ParameterError: there is no such class, or it is not a processor.
    """
    target = given if not isinstance(given, str) else _named(given)
    # Built-ins take a `BatchState`, whatever the name of their argument.
    if isinstance(target, type) and not target.__module__.startswith(_BUILT_IN_HOME):
        target = styles.styled(target)
    is_processor = isinstance(target, type) and issubclass(target, LogitsProcessor)
    known = f"and its update_state has no argument {' or '.join(styles.STYLES)}"
    require(
        is_processor, _WHERE, f"{given!r} is not a subclass of logprobe.processors.LogitsProcessor, {known}"
    )
    processor: type[LogitsProcessor] = target
    lacking = sorted(getattr(processor, "__abstractmethods__", ()))
    require(not lacking, _WHERE, f"{given!r} does not define {', '.join(lacking)}")
    args = processor.Args
    is_struct = args is None or (isinstance(args, type) and issubclass(args, msgspec.Struct))
    require(is_struct, _WHERE, f"{given!r}: Args must be a msgspec.Struct class, got {args!r}")
    if args is not None:
        _check_types(args, given)
    _check_names(processor, given)
    return processor


def load_processors(specs: Iterable[str | type]) -> dict[str, type[LogitsProcessor]]:
    """Resolve several specifications and return the classes by name, in the given order.

    Raises:
        ParameterError: a class is given twice, or for the reasons in `load_processor`.
    """
    loaded: dict[str, type[LogitsProcessor]] = {}
    for spec in specs:
        processor = load_processor(spec)
        name = processor.__name__
        require(name not in loaded, _WHERE, f"{name} is registered twice; name each processor once")
        loaded[name] = processor
    return loaded


def make_processor(processor: type[LogitsProcessor], config: EngineConfig) -> LogitsProcessor:
    """Create an instance, and pass the configuration only if `__init__` takes it."""
    if issubclass(processor, styles.UpdateStyle):
        return processor(*styles.arguments_of(processor, config))
    first = next(iter(inspect.signature(processor).parameters.values()), None)
    if first is None or first.kind is first.KEYWORD_ONLY:
        return processor()  # type: ignore[call-arg]  # custom `__init__`
    is_optional = first.default is not first.empty or first.kind is first.VAR_KEYWORD
    if is_optional and first.name != "config":
        return processor()  # type: ignore[call-arg]
    return processor(config)


def describe_processor(given: str | type) -> dict[str, Any]:
    """Return a processor's name, its docstring's first paragraph, and its arguments' JSON Schema."""
    processor = load_processor(given)
    doc = (inspect.getdoc(processor) or "").split("\n\n", maxsplit=1)[0]
    return {
        "name": processor.__name__,
        "doc": " ".join(doc.split()),
        "args": None if processor.Args is None else _schema(processor.Args),
    }


def built_in_with(key: str) -> str | None:
    """Return the name of the built-in processor with the argument `key`; None if there is none."""
    owners = {arg: name for name in BUILT_INS for arg in keys_of(_args_of(load_processor(name)))}
    return owners.get(key)


def _check_names(processor: type[LogitsProcessor], given: object) -> None:
    names = processor.arg_names
    are_names = isinstance(names, tuple) and all(isinstance(name, str) for name in names)
    require(are_names, _WHERE, f"{given!r}: arg_names must be a tuple of strings", got=names)
    is_one = processor.Args is None or not names
    require(is_one, _WHERE, f"{given!r}: has both Args and arg_names; leave arg_names out")
    if processor.applies_to_all and processor.Args is not None:
        needed = [field.name for field in msgspec.structs.fields(processor.Args) if field.required]
        require(not needed, _WHERE, f"{given!r} applies to all requests; give {', '.join(needed)} a default")


def _check_types(args: type[msgspec.Struct], given: object) -> None:
    """Raise `ParameterError`, at startup instead of at the first request, for types that do not resolve."""
    try:
        msgspec.inspect.type_info(args)
    except (NameError, TypeError, AttributeError) as error:
        raise ParameterError(_WHERE, f"{given!r}: the types of its Args cannot be read: {error}") from error


def _args_of(processor: type[LogitsProcessor]) -> type[msgspec.Struct]:
    assert processor.Args is not None, "every built-in has `Args`"
    return processor.Args


def _schema(args: type[msgspec.Struct]) -> dict[str, Any]:
    schemas, parts = msgspec.json.schema_components([args], ref_template="#/$defs/{name}")
    own: dict[str, Any] = parts.pop(schemas[0]["$ref"].rsplit("/", maxsplit=1)[-1])
    return {**own, "$defs": parts} if parts else own


def _named(name: str) -> Any:
    if ":" in name:
        return _imported(name)
    if name in BUILT_INS:
        return getattr(import_module("logprobe.processors"), name)
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in points:
        known = ", ".join(available_processors())
        raise ParameterError(_WHERE, f"no processor {name!r}; known: {known}, or use module.path:ClassName")
    try:
        return points[name].load()
    except Exception as error:
        raise ParameterError(_WHERE, f"entry point {name!r} cannot be loaded: {error!r}") from error


def _imported(spec: str) -> Any:
    module_name, _, attribute = spec.partition(":")
    is_well_formed = module_name and attribute and ":" not in attribute and " " not in spec
    require(is_well_formed, _WHERE, f"{spec!r} is malformed; write module.path:ClassName")
    folder = str(Path.cwd())
    if folder not in sys.path:
        # at the end, so that it shadows nothing; console scripts do not search the current folder
        sys.path.append(folder)
    try:
        module = import_module(module_name)
    except Exception as error:
        hint = (
            f"; the current folder {folder} was searched too"
            if isinstance(error, ModuleNotFoundError)
            else ""
        )
        raise ParameterError(_WHERE, f"{spec!r}: cannot import {module_name!r}: {error!r}{hint}") from error
    target = getattr(module, attribute, None)
    require(target is not None, _WHERE, f"{spec!r}: module {module_name!r} has no {attribute!r}")
    return target
