"""Replies as Arrow streams and Parquet files, for requests whose `Accept` header asks for them.

Modules that need pyarrow (extra `arrow`) are imported inside methods, which run in worker threads, so that
the import does not block the event loop.
"""

from __future__ import annotations

import logging
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from logprobe.records.rows import KERNEL_EXTRAS
from logprobe.server.http.errors import as_api_error, bad_request
from logprobe.server.http.replies import ARROW_TYPE, JSON_TYPE, PARQUET_TYPE, StreamedReply, while_connected

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from starlette.requests import Request as HttpRequest

    from logprobe.engine.request import CompletionOutput, CompletionPiece
    from logprobe.records import FlatLogprobs
    from logprobe.records.replies import Part, ReplySchema
    from logprobe.server.http.errors import ApiError
    from logprobe.server.reply import Generation, Shape
    from logprobe.server.service import Service

logger = logging.getLogger("logprobe.server")


async def answer_binary(
    request: HttpRequest,
    service: Service,
    generation: Generation,
    shape: Shape,
    media_type: str,
    *,
    is_stream: bool,
) -> Response:
    """Run a generation and return the reply in a binary type; see `answers.answer`.

    Raises:
        ApiError: the request asks for values that these types do not have.
    """
    if generation.field_logprobs:
        raise bad_request("field_logprobs", f"is not reported in binary replies; accept {JSON_TYPE}")
    if generation.hides_reasoning:
        raise bad_request("include_reasoning", f"must be true in binary replies; accept {JSON_TYPE}")
    if is_stream and media_type == PARQUET_TYPE:
        raise bad_request(
            "stream", f"a Parquet reply cannot be streamed; leave stream out, or accept {ARROW_TYPE}"
        )
    rows = ReplyWriter(service, generation, shape)
    if is_stream:
        headers = {"content-type": media_type, "cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamedReply(
            rows.stream(),
            headers,
            check=service.check_engine,
            failed=lambda error: rows.failed(as_api_error(error)),
        )
    await while_connected(request.receive, generation.run(), service.check_engine)
    data = await service.workers.write(partial(rows.whole, is_parquet=media_type == PARQUET_TYPE), None)
    return Response(data, media_type=media_type)


class ReplyWriter:
    """Writes the rows of one reply; the `Shape` of the route writes the other fields as JSON."""

    def __init__(self, service: Service, generation: Generation, shape: Shape) -> None:
        self._service, self._generation, self._shape = service, generation, shape
        self._schema: ReplySchema | None = None  # of a stream, once it was sent
        self._begun: set[int] = set()  # prompts whose rows have been written

    def whole(self, *, is_parquet: bool) -> bytes:
        """Return a finished generation as an Arrow stream or Parquet file."""
        pieces = self._generation.whole()
        parts = [part for piece in pieces for part in self._parts(piece)]
        kinds = self._kinds()
        schema = self._new_schema(kinds, self._reply(pieces), is_complete=is_parquet)
        batches = schema.batches(parts)
        return self._counted(schema.parquet(batches) if is_parquet else schema.whole_stream(batches))

    async def stream(self) -> AsyncGenerator[bytes]:
        """Yield the schema and first rows, then the new rows of each step, then the rest of the reply."""
        write = self._service.workers.write
        try:
            async with aclosing(self._generation.stream()) as steps:
                async for pieces in steps:
                    # The first job imports pyarrow.
                    num_entries = self._generation.num_entries_of(pieces) if self._schema else None
                    schema, data = await write(partial(self._step, pieces), num_entries)
                    self._schema = schema  # only now: a job that fails or is cancelled sends nothing
                    if data:
                        yield data
            yield await write(self._end, self._generation.num_completion_tokens)
        except Exception as error:
            failure = as_api_error(error)
            if failure.code == "internal_error":
                logger.exception("a stream failed")
            yield self.failed(failure)

    def failed(self, error: ApiError) -> bytes:
        """Return the end of a failed stream: an empty batch with the error as metadata."""
        from logprobe.records.replies import ERROR_KEY

        return self._closing({ERROR_KEY: msgspec.json.encode(error.to_dict())})

    def _step(self, pieces: Sequence[CompletionPiece]) -> tuple[ReplySchema, bytes]:
        """Return the stream's schema and the pieces' rows as bytes, with the schema first if unsent."""
        parts = [part for piece in pieces for part in self._parts(piece)]
        parts = [part for part in parts if part.token_ids]
        schema, opening = self._begin()
        return schema, self._counted(opening + schema.step(schema.batches(parts)))

    def _end(self) -> bytes:
        from logprobe.records.replies import REPLY_KEY

        return self._closing({REPLY_KEY: self._reply(self._generation.whole_again())})

    def _closing(self, metadata: dict[bytes, bytes]) -> bytes:
        schema, opening = self._begin()
        return self._counted(opening + schema.closing(metadata))

    def _begin(self) -> tuple[ReplySchema, bytes]:
        """Return the stream's schema and the schema's bytes, which are empty if they have been sent."""
        if self._schema is not None:
            return self._schema, b""
        schema = self._new_schema(self._kinds() if self._generation.outputs else {})
        return schema, schema.opening()

    def _counted(self, data: bytes) -> bytes:
        self._service.metrics.bytes_out.inc(len(data))
        return data

    # -- rows ------------------------------------------------------------------------------------------------

    def _parts(self, piece: CompletionPiece) -> Iterator[Part]:
        """Yield the rows of a piece; the first piece of a prompt's first choice includes the prompt's."""
        from logprobe.records.replies import Part

        number, completion = self._generation.prompt_of(piece), piece.completion
        is_first = piece.index % self._generation.params.n == 0 and number not in self._begun
        output = self._generation.outputs[number]
        if is_first and output.prompt_logprobs is not None:
            self._begun.add(number)
            record, ids = output.prompt_logprobs, output.prompt_token_ids
            yield Part(f"{piece.index}/prompt", record.copy().rows, 0, ids[: len(record)], None)
        ids, texts = completion.token_ids[piece.start : piece.stop], token_texts(piece)
        yield Part(f"{piece.index}", _rows(completion.logprobs), piece.start, ids, texts)
        if completion.processed_logprobs is not None:
            own = _rows(completion.processed_logprobs)
            yield Part(f"{piece.index}/processed", own, piece.start, ids, texts)

    def _kinds(self) -> dict[str, FlatLogprobs | None]:
        """Return one record of each kind, by the suffix of its name: "", "processed" or "prompt"."""
        first = self._generation.outputs[min(self._generation.outputs)]
        completion = first.outputs[0]
        records = {"": completion.logprobs, "processed": completion.processed_logprobs}
        return records | {"prompt": first.prompt_logprobs}

    def _new_schema(
        self, kinds: dict[str, FlatLogprobs | None], reply: bytes | None = None, *, is_complete: bool = False
    ) -> ReplySchema:
        from logprobe.records.replies import ReplySchema

        params = self._generation.params
        infos = {name: record.info for name, record in kinds.items() if record is not None}
        widths = {info.num_logprobs for info in infos.values() if info is not None}
        extras = [name for name in KERNEL_EXTRAS if getattr(params, name)]
        if params.logprobs_mode != "raw_logprobs":
            extras.append("log_kept_mass")
        return ReplySchema(
            infos,
            {width for width in widths if width is not None},
            extras,
            has_given=bool(params.logprob_token_ids),
            reply=reply,
            is_complete=is_complete,
        )

    def _reply(self, pieces: Sequence[CompletionPiece]) -> bytes:
        """Return the JSON of the reply without rows."""
        outputs = self._generation.outputs
        for number, output in outputs.items():
            outputs[number] = replace(output, prompt_logprobs=None, outputs=[*map(_bare, output.outputs)])
        pieces = [replace(piece, completion=_bare(piece.completion)) for piece in pieces]
        return msgspec.json.encode(self._shape.whole(pieces))


def _bare(completion: CompletionOutput) -> CompletionOutput:
    return replace(completion, logprobs=None, processed_logprobs=None)


def _rows(record: FlatLogprobs | None) -> Any:
    return None if record is None else record.rows


def token_texts(piece: CompletionPiece) -> list[str]:
    """Return the text of each token of a piece; joined, these texts are the piece's text."""
    if not piece.offsets:
        return []
    first = piece.offsets[0]
    bounds = [0, *(offset - first for offset in piece.offsets[1:]), len(piece.text)]
    return [piece.text[start:stop] for start, stop in pairwise(bounds)]
