"""Response templates: the syntax of a model's replies as data, in the format of transformers 5.

A template has fields, such as `content` and `tool_calls`. The text of a field stands between an opening and a
closing marker; at most one field has no opening marker and gets the text that no other field claims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import regex

from logprobe.errors import ParameterError
from logprobe.text.channels.content import READERS

_PLACEHOLDER: Final = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
_TEMPLATE_KEYS: Final = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS: Final = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
    *("repeats", "join", "optional", "transform", "transform_each"),
}


@dataclass(frozen=True, slots=True)
class Marker:
    """A text or pattern that opens or closes a field."""

    pattern: regex.Pattern[str]
    may_grow: bool  # more text may extend a match that ends at the end of the text so far


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateField:
    """A field of a reply: its markers, and how its text becomes a value."""

    name: str
    open: Marker | None  # None: the field gets the text outside all other fields
    close: Marker | None  # None: the field ends with the reply
    content: str  # name of a reader in `content.READERS`
    content_args: Mapping[str, Any]
    transform: Any  # layout of the value, with placeholders such as `{content}`; None: the value as read
    transform_each: bool  # apply `transform` to each item of a list


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTemplate:
    """A validated response template."""

    fields: Mapping[str, TemplateField]
    implicit: str | None  # name of the field without an opening marker
    start_anchor: regex.Pattern[str]  # matches the text of a prompt just before a reply


def load_response_template(spec: object) -> ResponseTemplate:
    """Validate a response template and compile its markers.

    Raises:
        ParameterError: `spec` is not a response template.
    """
    if not isinstance(spec, Mapping):
        raise _invalid(f"must be an object, got {type(spec).__name__}")
    if spec.get("version", 1) != 1:
        raise _invalid(f"version {spec['version']!r:.40} is not supported; use version 1")
    _check_keys(spec, _TEMPLATE_KEYS, "")
    if not isinstance(spec.get("defaults", {}), Mapping):
        raise _invalid("defaults must be an object")
    given = spec.get("fields")
    if not isinstance(given, Mapping) or not given:
        raise _invalid("fields must be an object with at least one field")
    fields = {name: _field(name, settings) for name, settings in given.items()}
    implicit = [name for name, field in fields.items() if field.open is None]
    if len(implicit) > 1:
        names = ", ".join(implicit)
        raise _invalid(f"at most one field may omit both open and open_pattern; these omit both: {names}")
    anchor = _marker(spec, "start_anchor", "start_anchor_pattern", "")
    if anchor is None:
        raise _invalid("start_anchor or start_anchor_pattern is missing")
    return ResponseTemplate(
        fields=fields, implicit=implicit[0] if implicit else None, start_anchor=anchor.pattern
    )


def read_field(body: str, field: TemplateField, captures: Mapping[str, str]) -> Any:
    """Return the value of a field from its text and the named groups of its opening marker.

    Raises:
        ValueError: the text does not have the form that the template describes.
        KeyError: a placeholder of the transform has no value.
    """
    value = READERS[field.content](body, field.content_args)
    if field.transform is None:
        return value
    if not field.transform_each:
        return _filled(field.transform, {**captures, "content": value})
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{field.name}: is not a list of objects, as transform_each requires")
    return [_filled(field.transform, {**captures, **item}) for item in value]


def _filled(transform: Any, values: Mapping[str, Any]) -> Any:
    """Return a transform with its placeholders replaced; `{a.b}` is key b of the value of a."""
    if isinstance(transform, Mapping):
        return {key: _filled(part, values) for key, part in transform.items()}
    if isinstance(transform, list):
        return [_filled(part, values) for part in transform]
    match = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if match is None:
        return transform
    first, *keys = match[1].split(".")
    value = values[first]
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"no value for the placeholder {transform}")
        value = value[key]
    return value


def _field(name: str, settings: object) -> TemplateField:
    where = f"fields.{name}: "
    if not isinstance(settings, Mapping):
        raise _invalid(f"{where}must be an object, got {type(settings).__name__}")
    _check_keys(settings, _FIELD_KEYS, where)
    content = settings.get("content", "text")
    if content not in READERS:
        raise _invalid(f"{where}unknown content {content!r:.40}; use one of {', '.join(READERS)}")
    if not isinstance(settings.get("content_args", {}), Mapping):
        raise _invalid(f"{where}content_args must be an object")
    join = settings.get("join")
    if join is not None and not isinstance(join, str):
        raise _invalid(f"{where}join must be a text, got {type(join).__name__}")
    if join is not None and not settings.get("repeats"):
        raise _invalid(f"{where}join requires repeats: true; set it, or leave join out")
    opened = _marker(settings, "open", "open_pattern", where)
    closed = _marker(settings, "close", "close_pattern", where)
    transform, each = settings.get("transform"), settings.get("transform_each", False)
    if not isinstance(each, bool) or (each and transform is None):
        raise _invalid(f"{where}transform_each must be true or false, and true requires a transform")
    _check_placeholders(transform, where)
    names = {name for marker in (opened, closed) if marker for name in marker.pattern.groupindex}
    if names and transform is None:
        listed = ", ".join(sorted(names))
        raise _invalid(f"{where}has no transform that uses the named groups {listed}; add one")
    return TemplateField(
        name=name,
        open=opened,
        close=closed,
        content=content,
        content_args=settings.get("content_args", {}),
        transform=transform,
        transform_each=each,
    )


def _marker(settings: Mapping[str, Any], text_key: str, pattern_key: str, where: str) -> Marker | None:
    """Compile a marker that is given as a text, a list of texts or a pattern; None if it is not given."""
    if text_key in settings and pattern_key in settings:
        raise _invalid(f"{where}has both {text_key} and {pattern_key}; leave one out")
    if pattern_key in settings:
        try:
            return Marker(regex.compile(settings[pattern_key], regex.DOTALL), may_grow=True)
        except (regex.error, TypeError) as error:
            raise _invalid(f"{where}{pattern_key} is not a regular expression: {error}") from error
    if text_key not in settings:
        return None
    given = settings[text_key]
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise _invalid(f"{where}{text_key} must be a text or a list of texts, none of them empty")
    longest_first = sorted(set(texts), key=len, reverse=True)
    may_grow = any(long.startswith(short) for short in texts for long in texts if long != short)
    return Marker(regex.compile("|".join(map(regex.escape, longest_first)), regex.DOTALL), may_grow)


def _check_placeholders(transform: Any, where: str) -> None:
    """Check that each text in a transform is either one placeholder or has none."""
    if isinstance(transform, Mapping | list):
        for part in transform.values() if isinstance(transform, Mapping) else transform:
            _check_placeholders(part, where)
    elif (
        isinstance(transform, str)
        and _PLACEHOLDER.search(transform)
        and not _PLACEHOLDER.fullmatch(transform)
    ):
        raise _invalid(f"{where}transform mixes a placeholder with other text: {transform!r:.80}; split it")


def _check_keys(settings: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = [str(name) for name in settings if name not in known]
    if unknown:
        raise _invalid(f"{where}unknown {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")


def _invalid(what: str) -> ParameterError:
    return ParameterError("response_template", what)
