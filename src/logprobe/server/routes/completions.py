"""`POST /v1/completions`: OpenAI's text completions, with `echo` for scoring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from logprobe.server.answers import answer
from logprobe.server.http.decode import read
from logprobe.server.openai.bodies import CompletionBody
from logprobe.server.openai.fields import completion_params, named_as_asked
from logprobe.server.openai.prompts import read_prompts
from logprobe.server.reply import ChoicesShape, Generation, usage
from logprobe.server.rows import (
    choice_extensions,
    completion_rows,
    ending_extensions,
    legacy_logprobs,
    num_ending_entries,
    prompt_extensions,
    reply_extensions,
    route_extensions,
    stop_reason,
)
from logprobe.text.pieces import TextWalk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    from logprobe.engine.request import CompletionPiece
    from logprobe.sampling import SamplingParams
    from logprobe.server.openai.prompts import Prompt
    from logprobe.server.service import Service

PARALLEL = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


async def completions(request: HttpRequest, service: Service) -> Response:
    """Create text completions; with `echo`, prompts are scored."""
    body, prompts, generation = await read(request, service, CompletionBody, prepare)
    shape = CompletionShape(service, body, generation, prompts)
    return await answer(request, service, generation, shape, is_stream=bool(body.stream))


def prepare(body: CompletionBody, service: Service) -> tuple[CompletionBody, list[Prompt], Generation]:
    """Read the prompts; validate and admit their requests."""
    service.choose_weights(body)
    service.log_body("completions", body)
    if body.return_tokens_as_token_ids:
        service.write_ids()
    with named_as_asked(body):
        params = completion_params(body, service.settings)
    prompts = read_prompts(body, params.max_tokens, service)
    limit = service.capabilities.max_model_len
    requests = [(prompt.token_ids, _fitting(params, body, prompt, limit)) for prompt in prompts]
    echoes = [b"".join(prompt.parts) for prompt in prompts] if body.echo else []
    with named_as_asked(body):
        generation = Generation(
            service,
            service.reply_id("cmpl", body.request_id),
            requests,
            echoes,
            field_logprobs=body.field_logprobs,
            shows_special=body.skip_special_tokens is False,
        )
        return body, prompts, generation


def _fitting(params: SamplingParams, body: CompletionBody, prompt: Prompt, limit: int) -> SamplingParams:
    """Set `max_tokens=0` for an echoed prompt of `limit` + 1 tokens, which leaves no room to generate.

    Evaluation harnesses send such prompts with `max_tokens=1` and read only the prompt's log-probabilities.
    """
    is_scored = body.echo and body.logprobs is not None and params.max_tokens == 1
    return replace(params, max_tokens=0) if is_scored and len(prompt.token_ids) == limit + 1 else params


@dataclass(frozen=True, slots=True)
class Echo:
    """An echoed prompt, with which each of the prompt's choices begins."""

    text: str
    logprobs: dict[str, list[Any]] | None


class CompletionShape(ChoicesShape[CompletionBody]):
    """OpenAI's `text_completion`; chunks have the same format as whole replies."""

    kinds = ("text_completion", "text_completion")
    begun_entries = 0

    def __init__(
        self, service: Service, body: CompletionBody, generation: Generation, prompts: Sequence[Prompt]
    ) -> None:
        super().__init__(service, body, generation)
        self._prompts = prompts
        self._begun: set[int] = set()  # choices whose echo has been sent
        self._echoes: dict[int, Echo] = {}  # by prompt, shared by its choices

    def whole(self, pieces: Sequence[CompletionPiece]) -> dict[str, Any]:
        """Return the reply, with choices in the order of the prompts."""
        reply = self._frame([self._begin(piece) for piece in pieces])
        return reply | {"usage": usage(self._generation)}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield nothing, because a stream begins with its first text."""
        yield from ()

    def chunks(self, piece: CompletionPiece) -> Iterator[dict[str, Any]]:
        """Yield one chunk; the first chunk of a choice includes the echo."""
        is_first = piece.index not in self._begun
        self._begun.add(piece.index)
        yield self._frame([self._begin(piece) if is_first else self._choice(piece)])

    def num_entries(self, pieces: Sequence[CompletionPiece]) -> int:
        """Return the cost (in entries) of writing finished choices, not counting log-probability rows."""
        return num_ending_entries(self._body, self._generation, pieces)

    def _choice(self, piece: CompletionPiece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": legacy_logprobs(
                self._service, piece, has_ranks=bool(self._body.return_token_ids and not self._body.echo)
            ),
            "finish_reason": piece.finish_reason,
            "stop_reason": stop_reason(piece),
            **choice_extensions(self._body, piece),
            **route_extensions(
                self._body, self._generation.outputs[self._generation.prompt_of(piece)], piece
            ),
            **ending_extensions(self._service, self._body, piece, self._generation.found.get(piece.index)),
        }

    def _begin(self, piece: CompletionPiece) -> dict[str, Any]:
        choice, number = self._choice(piece), self._generation.prompt_of(piece)
        output = self._generation.outputs[number]
        if self._body.echo:
            self._prepend(choice, self._echo(number))
            if choice["logprobs"] is not None and self._is_unextended(number):
                _add_empty_entry(choice)
        if piece.index % self._generation.params.n == 0:
            choice |= prompt_extensions(self._service, self._body, output)
        return choice | reply_extensions(self._body, self._generation.params, output)

    @staticmethod
    def _prepend(choice: dict[str, Any], echo: Echo) -> None:
        choice["text"] = echo.text + choice["text"]
        if echo.logprobs is not None:
            rows = choice["logprobs"]
            choice["logprobs"] = rows | {name: echo.logprobs[name] + rows[name] for name in PARALLEL}

    def _is_unextended(self, number: int) -> bool:
        request = self._generation.requests[number]
        return self._body.max_tokens != 0 and request.params.max_tokens == 0

    def _echo(self, number: int) -> Echo:
        if number not in self._echoes:
            self._echoes[number] = self._new_echo(number)
        return self._echoes[number]

    def _new_echo(self, number: int) -> Echo:
        walk, texts, offsets = TextWalk(), [], []
        for part in self._prompts[number].parts:
            text, begins_at = walk.feed(part)
            texts.append(text)
            offsets.append(begins_at)
        record = self._generation.outputs[number].prompt_logprobs
        if record is None or self._body.logprobs is None:
            return Echo("".join(texts), None)
        tokens = self._service.tokens
        ids = self._prompts[number].token_ids.tolist()
        rows: dict[str, list[Any]] = {"tokens": [tokens.token_text(token_id) for token_id in ids]}
        rows |= completion_rows(record, tokens) | {"text_offset": offsets}
        return Echo("".join(texts), rows)


def _add_empty_entry(choice: dict[str, Any]) -> None:
    """Append an empty entry to the arrays for the token that did not fit after the prompt."""
    rows = choice["logprobs"]
    for name in ("token_logprobs", "top_logprobs"):
        rows[name].append(None)
    rows["tokens"].append("")
    rows["text_offset"].append(len(choice["text"]))
