"""What replies say of their tokens: rows of log-probabilities, further columns, and the extensions asked for.

Before it: pieces of completions, with their records. After it: the shapes of the routes. Rows are written
one by one, as raw JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from logprobe.errors import ParameterError
from logprobe.records.forms.json import (
    IMPOSSIBLE,
    entry_rows,
    finite,
    finite_fields,
    legacy_rows,
    position_rows,
)
from logprobe.scoring.fields import Field, fields_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logprobe.engine.request import CompletionPiece, RequestOutput
    from logprobe.models import Vocabulary
    from logprobe.processors import ProcessorEffect
    from logprobe.records import FlatLogprobs
    from logprobe.sampling import SamplingParams
    from logprobe.server.openai.bodies import GenerationBody, ResponsesBody
    from logprobe.server.reply import Generation
    from logprobe.server.service import Service


def num_top(generation: Generation) -> int | None:
    """How many alternatives were asked; None for the whole vocabulary."""
    k = generation.params.logprobs
    return None if k == -1 else k


def chat_logprobs(service: Service, generation: Generation, piece: CompletionPiece) -> dict[str, Any] | None:
    """OpenAI's chat object for the tokens of a piece that gave text, with the extensions asked for."""
    record = piece.completion.logprobs
    if record is None:
        return None
    rows, top = piece.text_tokens, num_top(generation)
    fields: dict[str, Any] = {"content": chat_rows(service, record, rows, top), "refusal": None}
    other = piece.completion.processed_logprobs
    if other is not None:
        fields["processed_content"] = chat_rows(service, other, rows, top)
        fields |= _extras(other, rows)
    return fields | _further_columns(record, rows, service)


def chat_rows(
    service: Service, record: FlatLogprobs, rows: Sequence[int], num_top: int | None
) -> msgspec.Raw:
    """The chat entries of some positions of a record."""
    return service.encoder.rows(record, rows, num_top, has_impossible=not is_processed(record))


def is_processed(record: FlatLogprobs) -> bool:
    """Whether its numbers are of the distribution that tokens were drawn from.

    What masks and truncation left fewer than k tokens of is filled up with tokens that cannot be drawn.
    """
    return record.info is not None and "processed" in record.info.stages


def legacy_logprobs(service: Service, piece: CompletionPiece) -> dict[str, Any] | None:
    """The completions object for all tokens of a piece, with the extensions asked for."""
    record = piece.completion.logprobs
    if record is None:
        return None
    vocabulary = service.text.vocabulary
    ids = piece.completion.token_ids[piece.start : piece.stop]
    fields: dict[str, Any] = {"tokens": [vocabulary.token_text(token_id) for token_id in ids]}
    fields |= completion_rows(record[piece.start : piece.stop], vocabulary)
    fields["text_offset"] = piece.offsets
    other = piece.completion.processed_logprobs
    if other is not None:
        fields["processed"] = completion_rows(other[piece.start : piece.stop], vocabulary)
        fields |= _extras(other, range(piece.start, piece.stop))
    return fields | _further_columns(record, range(piece.start, piece.stop), service)


def completion_rows(record: FlatLogprobs, vocabulary: Vocabulary) -> dict[str, list[Any]]:
    """The completions object's numbers of all rows of a record, its maps as JSON."""
    rows = legacy_rows(record, vocabulary, has_impossible=not is_processed(record))
    return rows | {"top_logprobs": _raw_rows(rows["top_logprobs"])}


def _raw_rows(rows: Iterable[Any]) -> list[msgspec.Raw]:
    """Each row as JSON: a call that writes all of them would keep every other thread waiting."""
    return [msgspec.Raw(msgspec.json.encode(row)) for row in rows]


def choice_extensions(body: GenerationBody, piece: CompletionPiece) -> dict[str, Any]:
    """Fields of a choice that are there only when asked for."""
    fields: dict[str, Any] = {}
    if body.return_token_ids:
        fields["token_ids"] = piece.completion.token_ids[piece.start : piece.stop]
    if body.explain:
        fields["explain"] = _explanations(piece)
    return fields


def ending_extensions(service: Service, body: GenerationBody, piece: CompletionPiece) -> dict[str, Any]:
    """What is told of a completion once it has ended, where it was asked for."""
    if not body.field_logprobs or piece.finish_reason is None:
        return {}
    completion = piece.completion
    assert completion.logprobs is not None, "they come beside logprobs"
    text, other = (
        service.text.text_of(completion.token_ids, completion.num_text_bytes),
        completion.processed_logprobs,
    )
    try:
        fields = fields_of(completion.logprobs, text)
        others = None if other is None else fields_of(other, text)
    except ParameterError:
        return {"fields": None}  # it ended before its JSON did, or wrote none
    rows = [_field(field) for field in fields]
    for row, field in zip(rows, others or (), strict=others is not None):
        row |= {"processed_logprob": field.logprob, "processed_upper": field.upper}
    return {"fields": [finite_fields(row) for row in rows]}


def _field(field: Field) -> dict[str, Any]:
    """A field with its numbers; an object's or array's value stands in its parts."""
    value = field.value
    is_large = isinstance(value, int) and not -(2**63) <= value < 2**64  # which no encoder writes
    return {
        "pointer": field.pointer,
        **({} if is_large or isinstance(value, dict | list) else {"value": value}),
        "logprob": field.logprob,
        "upper": field.upper,
        "tokens": [field.tokens.start, field.tokens.stop],
        "least_sure": field.least_sure,
    }


def prompt_extensions(service: Service, body: GenerationBody, output: RequestOutput) -> dict[str, Any]:
    """Fields about a prompt that are there only when asked for."""
    fields: dict[str, Any] = {}
    if body.return_token_ids:
        fields["prompt_token_ids"] = output.prompt_token_ids
    if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
        record = output.prompt_logprobs
        fields["prompt_logprobs"] = _raw_rows(position_rows(record, service.text.vocabulary))
        beside = _further_columns(record, range(len(record)), service)
        fields |= {f"prompt_{name}": values for name, values in beside.items()}
    return fields


def reply_extensions(
    body: GenerationBody | ResponsesBody, params: SamplingParams, output: RequestOutput | None
) -> dict[str, Any]:
    """What the numbers are, where the request or the server was particular about it."""
    is_told = body.logprobs_mode is not None or params.logprobs_mode != "raw_logprobs"
    if not is_told or output is None or output.info is None:
        return {}
    return {"logprobs_info": output.info.to_dict()}


def _further_columns(record: FlatLogprobs, rows: Any, service: Service) -> dict[str, Any]:
    """Further columns and named ids of the rows, parallel to them; nothing where there is none."""
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
    """An effect with numbers that JSON has: made impossible is -9999, made possible again 9999."""
    changes = {
        str(token_id): max(min(change, -IMPOSSIBLE), IMPOSSIBLE)
        for token_id, change in effect.changes.items()
    }
    return {"processor": effect.processor, "changes": changes, "mass_moved": effect.mass_moved}
