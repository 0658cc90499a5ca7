"""The per-token parts of replies: log-probability rows, further columns, and requested extensions.

Each row is encoded to raw JSON in a separate call, so that other threads can run in between.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial, reduce
from itertools import compress
from operator import add
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logprobe.analysis.schemas import json_text
from logprobe.errors import ParameterError
from logprobe.records.fields import Field, Spelt
from logprobe.records.forms.finite import IMPOSSIBLE, finite, finite_fields, finite_value
from logprobe.records.forms.json import entry_rows, id_rows, legacy_rows, position_rows, runs
from logprobe.server.reply_channels import text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from logprobe.analysis.members import FieldDistribution
    from logprobe.engine.request import CompletionOutput, CompletionPiece, RequestOutput
    from logprobe.processors import ProcessorEffect
    from logprobe.records import FlatLogprobs
    from logprobe.records.values import TokenTable
    from logprobe.sampling import SamplingParams
    from logprobe.server.members import FoundFields
    from logprobe.server.openai.bodies import GenerationBody, ResponsesBody
    from logprobe.server.reply import Generation
    from logprobe.server.reply_channels import ReplyChannels, ReplySegment
    from logprobe.server.service import Service

ROUTES_PER_ENTRY: Final = 16  # expert ids that take the time of one entry to write


def num_top(generation: Generation) -> int | None:
    """Return the requested number of alternatives, or None for the whole vocabulary."""
    k = generation.params.logprobs
    return None if k == -1 else k


def chat_logprobs(
    service: Service, generation: Generation, completion: CompletionOutput, channels: ReplyChannels
) -> dict[str, Any] | None:
    """Return a `logprobs` object as in OpenAI's chat API, or None if logprobs were not requested.

    In addition to OpenAI's fields, the object has the reasoning and tool-call channels and extra columns.
    """
    if completion.logprobs is None:
        return None
    table = partial(_table, service, num_top(generation), completion)
    fields: dict[str, Any] = {"refusal": None} | _named("content", table(channels.content))
    if channels.reasoning:
        fields |= _named("reasoning", table(channels.reasoning))
    if channels.calls:
        calls = [table([call]) for call in channels.calls]
        fields |= _named("tool_calls", {name: [call[name] for call in calls] for name in calls[0]})
    return fields


def _table(
    service: Service, num_top: int | None, completion: CompletionOutput, segments: Sequence[ReplySegment]
) -> dict[str, Any]:
    """Return the rows of segments under each requested distribution, with further columns."""
    record, other = completion.logprobs, completion.processed_logprobs
    assert record is not None, "logprobs were requested"
    positions = [row for segment in segments for row in segment.rows]
    table: dict[str, Any] = {"rows": chat_rows(service, record, segments, num_top)}
    if other is not None:
        table |= {"processed": chat_rows(service, other, segments, num_top)} | _extras(other, positions)
    return table | _further_columns(record, positions, service)


def _named(channel: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Rename a table's fields: the rows get the channel's name, and other columns get this name as a prefix.

    In the content channel, the other columns have no prefix.
    """
    names = {"rows": channel, "processed": f"processed_{channel}"}
    before = "" if channel == "content" else f"{channel}_"
    return {names.get(name, f"{before}{name}"): values for name, values in table.items()}


def chat_rows(
    service: Service, record: FlatLogprobs, segments: Sequence[ReplySegment], num_top: int | None
) -> msgspec.Raw:
    """Return a JSON array with one entry per token in segments, as in OpenAI's chat API."""
    has_impossible = not is_processed(record)
    arrays = [
        service.encoder.rows(
            record, segment.rows, num_top, has_impossible=has_impossible, parts=segment.parts
        )
        for segment in segments
    ]
    if len(arrays) == 1:
        return arrays[0]
    entries = [bytes(array)[1:-1] for array in arrays]
    return msgspec.Raw(b"[" + b",".join(filter(None, entries)) + b"]")


def is_processed(record: FlatLogprobs) -> bool:
    """Return True if a record has the processed distribution, from which tokens are sampled.

    If masks and truncation leave fewer than k tokens, the rows of such a record also list tokens with
    probability 0.
    """
    return record.info is not None and "processed" in record.info.stages


def legacy_logprobs(
    service: Service, piece: CompletionPiece, *, has_ranks: bool = False
) -> dict[str, Any] | None:
    """Return the completions `logprobs` object for all tokens in a piece, with requested extensions.

    With `has_ranks`, the object has the rank of each token. Returns None if logprobs were not requested.
    """
    record = piece.completion.logprobs
    if record is None:
        return None
    tokens = service.tokens
    ids = piece.completion.token_ids[piece.start : piece.stop]
    fields: dict[str, Any] = {"tokens": [tokens.token_text(token_id) for token_id in ids]}
    fields |= completion_rows(record[piece.start : piece.stop], tokens)
    fields["text_offset"] = piece.offsets
    if has_ranks:
        fields["ranks"] = record[piece.start : piece.stop].chosen_entries().rank_list()
    other = piece.completion.processed_logprobs
    if other is not None:
        fields["processed"] = completion_rows(other[piece.start : piece.stop], tokens)
        fields |= _extras(other, range(piece.start, piece.stop))
    return fields | _further_columns(record, range(piece.start, piece.stop), service)


def completion_rows(record: FlatLogprobs, tokens: TokenTable) -> dict[str, list[Any]]:
    """Return `token_logprobs` and `top_logprobs` (as raw JSON) of the completions `logprobs` object."""
    rows = legacy_rows(record, tokens, has_impossible=not is_processed(record))
    return rows | {"top_logprobs": _raw_rows(rows["top_logprobs"])}


def _raw_rows(rows: Iterable[Any]) -> list[msgspec.Raw]:
    """Encode rows one by one, because a single call for all rows would hold the GIL for too long."""
    return [msgspec.Raw(msgspec.json.encode(row)) for row in rows]


def choice_extensions(body: GenerationBody, piece: CompletionPiece) -> dict[str, Any]:
    """Return the optional fields of a choice that the request body asks for."""
    fields: dict[str, Any] = {}
    if body.return_token_ids or body.digest:
        fields["token_ids"] = piece.completion.token_ids[piece.start : piece.stop]
    if body.explain:
        fields["explain"] = _explanations(piece)
    if body.digest:
        digests = piece.completion.digests or []
        fields["digests"] = [digest.hex() for digest in digests[piece.start : piece.stop]]
    return fields


def stop_reason(piece: CompletionPiece) -> int | str | None:
    """Return the stop string or stop token id that ended a choice; None if the choice did not end at one."""
    return None if piece.finish_reason is None else piece.completion.stop_reason


def ending_extensions(
    service: Service,
    body: GenerationBody,
    piece: CompletionPiece,
    found: FoundFields | None = None,
    channels: ReplyChannels | None = None,
) -> dict[str, Any]:
    """Return the optional fields of a finished completion; {} if not requested or not finished.

    Args:
        service: the service for this request.
        body: the request body.
        piece: the last piece of the completion.
        found: the JSON fields with their members, if the request asked for members.
        channels: the completion's segments; None if the completion is not split into channels.
    """
    if not body.field_logprobs or piece.finish_reason is None:
        return {}
    completion = piece.completion
    if channels is None and found is not None:
        return {"fields": list(map(_found_field, found.fields))}
    if channels is None:
        text = service.text.text_of(completion.token_ids, completion.num_text_bytes)
        return {"fields": _written(_values(_records(completion), text))}
    fields: dict[str, Any] = {"fields": segment_fields(completion, channels.content, found)}
    if channels.calls:
        fields["tool_call_fields"] = [call_fields(completion, call) for call in channels.calls]
    return fields


def route_extensions(body: GenerationBody, output: RequestOutput, piece: CompletionPiece) -> dict[str, Any]:
    """Return the expert routes of all processed tokens of a finished completion; {} if not requested."""
    if not body.return_routed_experts or piece.finish_reason is None:
        return {}
    routes = output.replayed_experts(piece.completion.index)
    little = routes.astype(routes.dtype.newbyteorder("<"), copy=False)
    return {"routed_experts": {"shape": routes.shape, "dtype": str(routes.dtype), "data": little.tobytes()}}


def num_ending_entries(
    body: GenerationBody | ResponsesBody, generation: Generation, pieces: Sequence[CompletionPiece]
) -> int:
    """Return the cost (in entries) of finished completions' fields and routes; 0 if not requested."""
    ended = [piece for piece in pieces if piece.finish_reason is not None]
    num_entries = sum(len(piece.completion.token_ids) for piece in ended) if body.field_logprobs else 0
    if getattr(body, "return_routed_experts", None):
        outputs = [generation.outputs[generation.prompt_of(piece)] for piece in ended]
        routes = [output.prompt_routed_experts for output in outputs]
        routes += [piece.completion.routed_experts for piece in ended]
        num_entries += sum(array.size for array in routes if array is not None) // ROUTES_PER_ENTRY
    return num_entries


def segment_fields(
    completion: CompletionOutput, segments: Sequence[ReplySegment], found: FoundFields | None = None
) -> list[dict[str, Any]] | None:
    """Return the fields in the JSON text that segments form, or None if it is not complete JSON.

    `found` has the fields in the completion's whole text, and is used if the segments form the whole text.
    """
    if found is not None and text_of(segments) == found.text:
        return list(map(_found_field, found.fields))
    return _written(_segment_values(completion, segments))


def call_fields(completion: CompletionOutput, segment: ReplySegment) -> list[dict[str, Any]] | None:
    """Return the JSON fields in a tool call's arguments, with pointers relative to the arguments.

    Returns None if the model did not write the arguments as JSON.
    """
    values = _segment_values(completion, [segment])
    assert segment.call is not None, "segments of this channel are calls"
    arguments = json.loads(segment.call.arguments)
    wholes = [field.pointer for field, *_ in values or () if field.value == arguments]
    if values is None or not wholes:
        return None
    whole = wholes[0]
    is_within = [f"{field.pointer}/".startswith(f"{whole}/") for field, *_ in values]
    within = [
        tuple(replace(field, pointer=field.pointer.removeprefix(whole)) for field in value)
        for value in compress(values, is_within)
    ]
    return _written(within)


def _segment_values(
    completion: CompletionOutput, segments: Sequence[ReplySegment]
) -> list[tuple[Field, ...]] | None:
    rows = [row for segment in segments for row in segment.rows]
    places = {row: place for place, row in enumerate(rows)}
    parts = {places[row]: data for segment in segments for row, data in segment.parts.items()}
    records = [
        reduce(add, [record[start:stop] for start, stop in runs(rows) or [(0, 0)]])
        for record in _records(completion)
    ]
    return _values(records, text_of(segments), parts)


def _records(completion: CompletionOutput) -> list[FlatLogprobs]:
    """Return a completion's record, or its two records if both distributions were requested."""
    assert completion.logprobs is not None, "field_logprobs requires logprobs"
    return [record for record in (completion.logprobs, completion.processed_logprobs) if record is not None]


def _values(
    records: Sequence[FlatLogprobs], text: str, parts: Mapping[int, bytes] | None = None
) -> list[tuple[Field, ...]] | None:
    """Return the fields in a JSON text, each as one `Field` per record, or None if it is not complete JSON.

    If only a part of a token belongs to the text, `parts` maps its position to the bytes of that part.
    """
    record, own = records[0], parts or {}
    assert record.table is not None, "records of replies have a token table"
    whole = map(record.table.token_bytes, record.chosen_entries().token_ids.tolist())
    try:
        spelt = Spelt([own.get(position, piece) for position, piece in enumerate(whole)], text)
    except ParameterError:
        return None  # truncated, or not JSON
    return list(zip(*(spelt.fields(record) for record in records), strict=True))


def _written(values: Sequence[tuple[Field, ...]] | None) -> list[dict[str, Any]] | None:
    return None if values is None else [_field(*value) for value in values]


def _field(field: Field, processed: Field | None = None) -> dict[str, Any]:
    """Return a field's entry; objects and arrays have no `value`, because their members have own entries."""
    value = field.value
    is_large = isinstance(value, int) and not -(2**63) <= value < 2**64  # msgspec cannot encode it
    row = {
        "pointer": field.pointer,
        **({} if is_large or isinstance(value, dict | list) else {"value": value}),
        "logprob": field.logprob,
        "upper": field.upper,
        "tokens": [field.tokens.start, field.tokens.stop],
        "least_sure": field.least_sure,
    }
    if processed is not None:
        row |= {"processed_logprob": processed.logprob, "processed_upper": processed.upper}
    return finite_fields(row)


def _found_field(one: FieldDistribution) -> dict[str, Any]:
    """Return a field's entry with its runner-up and members."""
    other = one.runner_up
    is_known = other is not None and finite_value(other[1]) is not None
    row = _field(one.raw, one.processed)
    row["runner_up"] = {"value": _value(other[0]), "share": other[1]} if other and is_known else None
    raw, grammar = one.members, one.grammar_members
    if raw is None:
        return row | {"members": None}
    columns = {"logprob": finite(raw.logprobs), "share": finite(raw.shares)}
    row |= {"rest": raw.rest, "unresolved": raw.unresolved}
    if grammar is not None:
        columns |= {"grammar_logprob": finite(grammar.logprobs), "grammar_share": finite(grammar.shares)}
        row["grammar_unresolved"] = grammar.unresolved
    members = [
        {"value": _value(value), **dict(zip(columns, numbers, strict=True))}
        for value, *numbers in zip(raw.values, *columns.values(), strict=True)
    ]
    return row | {"members": members}


def _value(value: Any) -> Any:
    """Return a member as raw JSON, because msgspec cannot encode large integers."""
    return value if isinstance(value, float) else msgspec.Raw(json_text(value).encode())


def prompt_extensions(service: Service, body: GenerationBody, output: RequestOutput) -> dict[str, Any]:
    """Return the optional fields about a prompt that the request body asks for."""
    fields: dict[str, Any] = {}
    if body.return_token_ids or body.digest:
        fields["prompt_token_ids"] = output.prompt_token_ids
    if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
        record = output.prompt_logprobs
        name, rows_of = ("prompt_rows", position_rows) if body.prompt_rows else ("prompt_logprobs", id_rows)
        fields[name] = _raw_rows(rows_of(record, service.text.vocabulary))
        beside = _further_columns(record, range(len(record)), service)
        fields |= {f"prompt_{name}": values for name, values in beside.items()}
    return fields


def reply_extensions(
    body: GenerationBody | ResponsesBody, params: SamplingParams, output: RequestOutput | None
) -> dict[str, Any]:
    """Return `logprobs_info` if a mode was requested or is not raw, or digests were requested; else {}."""
    is_told = body.logprobs_mode is not None or params.logprobs_mode != "raw_logprobs" or params.digest
    if not is_told or output is None or output.info is None:
        return {}
    return {"logprobs_info": output.info.to_dict()}


def _further_columns(record: FlatLogprobs, rows: Any, service: Service) -> dict[str, Any]:
    """Return further columns with a value per row: extra columns, and entries of requested token ids."""
    fields = _extras(record, rows)
    if record.given is not None:
        vocabulary = service.text.vocabulary
        fields["given"] = _raw_rows(entry_rows(record.given[row : row + 1], vocabulary)[0] for row in rows)
    return fields


def _extras(record: FlatLogprobs, rows: Any) -> dict[str, Any]:
    return {name: finite(values[list(rows)]) for name, values in record.extras.items()}


def _explanations(piece: CompletionPiece) -> list[Any]:
    explanations = piece.completion.explanations or []
    return [[_effect(effect) for effect in position] for position in explanations[piece.start : piece.stop]]


def _effect(effect: ProcessorEffect) -> dict[str, Any]:
    """Return a processor's effect; changes are clamped to [-9999, 9999], as JSON has no infinities."""
    changes = {
        str(token_id): max(min(change, -IMPOSSIBLE), IMPOSSIBLE)
        for token_id, change in effect.changes.items()
    }
    return {"processor": effect.processor, "changes": changes, "mass_moved": effect.mass_moved}
