"""What replies of all kinds share: usage, reasons, extension fields.

Before it: pieces. After it: each route's own shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from logprobe.records.forms.json import IMPOSSIBLE, entry_rows, finite, legacy_rows, position_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logprobe.engine.request import CompletionPiece, RequestOutput
    from logprobe.models import Vocabulary
    from logprobe.processors import ProcessorEffect
    from logprobe.records import FlatLogprobs
    from logprobe.server.openai.bodies import GenerationBody
    from logprobe.server.reply.generation import Generation
    from logprobe.server.service import Service

JSON_TYPE = "application/json"


def usage(generation: Generation) -> dict[str, int]:
    """Tokens in and out, so far."""
    prompt, completion = generation.num_prompt_tokens, generation.num_completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def num_top(generation: Generation) -> int | None:
    """How many alternatives were asked; None for the whole vocabulary."""
    asked = generation.params.logprobs
    return None if asked == -1 else asked


def chat_logprobs(service: Service, generation: Generation, piece: CompletionPiece) -> dict[str, Any] | None:
    """OpenAI's chat object for the tokens of a piece that gave text, with the extensions asked for."""
    record = piece.completion.logprobs
    if record is None:
        return None
    rows, top = piece.text_tokens, num_top(generation)
    found: dict[str, Any] = {"content": service.encoder.rows(record, rows, top), "refusal": None}
    other = piece.completion.processed_logprobs
    if other is not None:
        found["processed_content"] = service.encoder.rows(other, rows, top)
        found |= _extras(other, rows)
    return found | _beside(record, rows, service)


def legacy_logprobs(service: Service, piece: CompletionPiece) -> dict[str, Any] | None:
    """The completions object for all tokens of a piece, with the extensions asked for."""
    record = piece.completion.logprobs
    if record is None:
        return None
    vocabulary = service.text.vocabulary
    ids = piece.completion.token_ids[piece.start : piece.stop]
    found: dict[str, Any] = {"tokens": [vocabulary.token_text(token_id) for token_id in ids]}
    found |= completion_rows(record[piece.start : piece.stop], vocabulary)
    found["text_offset"] = piece.offsets
    other = piece.completion.processed_logprobs
    if other is not None:
        found["processed"] = completion_rows(other[piece.start : piece.stop], vocabulary)
        found |= _extras(other, range(piece.start, piece.stop))
    return found | _beside(record, range(piece.start, piece.stop), service)


def completion_rows(record: FlatLogprobs, vocabulary: Vocabulary) -> dict[str, list[Any]]:
    """The completions object's numbers of all rows of a record, its maps as JSON."""
    rows = legacy_rows(record, vocabulary)
    return rows | {"top_logprobs": _written(rows["top_logprobs"])}


def _written(rows: Iterable[Any]) -> list[msgspec.Raw]:
    """Each row as JSON: a call that writes all of them would keep every other thread waiting."""
    return [msgspec.Raw(msgspec.json.encode(row)) for row in rows]


def choice_extensions(body: GenerationBody, piece: CompletionPiece) -> dict[str, Any]:
    """Fields of a choice that are there only when asked for."""
    found: dict[str, Any] = {}
    if body.return_token_ids:
        found["token_ids"] = piece.completion.token_ids[piece.start : piece.stop]
    if body.explain:
        found["explain"] = _explanations(piece)
    return found


def prompt_extensions(service: Service, body: GenerationBody, output: RequestOutput) -> dict[str, Any]:
    """Fields about a prompt that are there only when asked for."""
    found: dict[str, Any] = {}
    if body.return_token_ids:
        found["prompt_token_ids"] = output.prompt_token_ids
    if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
        record = output.prompt_logprobs
        found["prompt_logprobs"] = _written(position_rows(record, service.text.vocabulary))
        beside = _beside(record, range(len(record)), service)
        found |= {f"prompt_{name}": values for name, values in beside.items()}
    return found


def reply_extensions(body: GenerationBody, output: RequestOutput | None) -> dict[str, Any]:
    """What the numbers are, where the request was particular about it."""
    if body.logprobs_mode is None or output is None or output.info is None:
        return {}
    return {"logprobs_info": output.info.to_dict()}


def encode(service: Service, reply: dict[str, Any]) -> bytes:
    """A reply as JSON, its log-probabilities counted."""
    data = msgspec.json.encode(reply)
    service.metrics.bytes_out.inc(len(data))
    return data


def _beside(record: FlatLogprobs, rows: Any, service: Service) -> dict[str, Any]:
    """Further columns and named ids of the rows, parallel to them; nothing where there is none."""
    found = _extras(record, rows)
    if record.given is not None:
        vocabulary = service.text.vocabulary
        found["given"] = _written(entry_rows(record.given[row : row + 1], vocabulary)[0] for row in rows)
    return found


def _extras(record: FlatLogprobs, rows: Any) -> dict[str, Any]:
    return {name: finite(values[list(rows)]) for name, values in record.extras.items()}


def _explanations(piece: CompletionPiece) -> list[Any]:
    told = piece.completion.explanations or []
    return [[_effect(one) for one in position] for position in told[piece.start : piece.stop]]


def _effect(effect: ProcessorEffect) -> dict[str, Any]:
    """An effect with numbers that JSON has: made impossible is -9999, made possible again 9999."""
    changes = {
        str(token_id): max(min(change, -IMPOSSIBLE), IMPOSSIBLE)
        for token_id, change in effect.changes.items()
    }
    return {"processor": effect.processor, "changes": changes, "mass_moved": effect.mass_moved}
