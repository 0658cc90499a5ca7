"""Probabilities of alternative values for the JSON fields in a reply (`field_logprobs: "members"`).

The members of a field are the values that the schema allows for the field, such as the values of an enum.
Once a choice has finished, the members are scored with further next-token distributions ("rows").
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from logprobe.analysis.schemas import Schema
from logprobe.errors import ParameterError, WeightsReplacedError
from logprobe.next_token.fields import FieldSums
from logprobe.processors.arguments import format_args
from logprobe.server.http.errors import bad_request
from logprobe.server.limits import Cost, check_count

if TYPE_CHECKING:
    from logprobe.analysis.members import FieldDistribution
    from logprobe.engine.request import RequestOutput
    from logprobe.sampling import SamplingParams
    from logprobe.server.service import Service
    from logprobe.transport.messages import Admitted

ROWS_AT_ONCE: Final = 16  # maximum number of concurrent rows for one reply
REQUESTS_PART: Final = 4  # concurrent rows are at most max_requests / 4
FIELD: Final = "field_logprobs"


@dataclass(frozen=True, slots=True)
class FoundFields:
    """Distributions of the JSON fields in one choice, whose whole text is JSON."""

    text: str
    fields: list[FieldDistribution]

    @property
    def num_entries(self) -> int:
        """Size for `Workers.write`: the number of fields with members, plus the number of all members."""
        return sum(1 + len(one.members.values) for one in self.fields if one.members is not None)


class FieldMembers:
    """Scores the members of a reply's fields, choice by choice, with the same row limit for each choice."""

    def __init__(self, service: Service, num_choices: int) -> None:
        settings = service.settings
        self._service = service
        self._max_rows = settings.max_field_rows // num_choices
        self._at_once = min(ROWS_AT_ONCE, self._max_rows, max(settings.max_requests // REQUESTS_PART, 1))
        self.cost = Cost.of_rows(self._max_rows * num_choices, self._at_once, service.vocab_size)
        self._requests = service.of_one_call()
        self._turn = asyncio.Lock()

    async def found(self, output: RequestOutput, index: int, admitted: Admitted) -> FoundFields | None:
        """Return the fields of a finished completion, or None if its text is not complete JSON.

        Raises:
            WeightsReplacedError: the weights that generated the completion have been replaced since.
            LogprobeError: the request for a row failed; the other requests were aborted.
        """
        service, completion = self._service, output.outputs[index]
        text = service.text.text_of(completion.token_ids, completion.num_text_bytes)
        whole = replace(output, outputs=[replace(completion, text=text)])
        async with self._turn:
            sums = await service.workers.write(partial(self._sums, whole, admitted), None)
            if sums is None:
                return None
            while asks := await service.workers.write(partial(sums.next_asks, self._at_once), None):
                prefixes = {ask.token_ids.tobytes(): ask.token_ids for ask in asks}
                try:
                    found = await service.rows(self._requests, list(prefixes.values()), sums.lora)
                finally:  # if the LoRA adapter was unloaded, say this instead of "unknown LoRA"
                    self._check_loads(output, admitted)
                rows = dict(zip(prefixes, found, strict=True))
                taken = partial(sums.take, asks, [rows[ask.token_ids.tobytes()] for ask in asks])
                await service.workers.write(taken, None)
            return FoundFields(text, await service.workers.write(sums.answer, None))

    def _sums(self, output: RequestOutput, admitted: Admitted) -> FieldSums | None:
        service, most = self._service, self._max_rows
        tools = service.spelling_tools()
        self._check_loads(output, admitted)
        try:
            return FieldSums(service.loaded, tools, output, None, 0, most, max_rows_in_all=most)
        except ParameterError as error:
            if error.parameter != "text":
                raise
            return None  # the JSON is truncated

    def _check_loads(self, output: RequestOutput, admitted: Admitted) -> None:
        """Raise `WeightsReplacedError` unless the weights that generated the reply are still loaded."""
        engine, lora = self._service.engine, admitted.request.params.lora
        is_same = engine.weights_number == output.weights_number
        if lora is not None:
            try:
                is_same &= engine.lora_number(lora) == admitted.lora_number
            except ParameterError:  # unloaded
                is_same = False
        if not is_same:
            raise WeightsReplacedError(
                "the weights were replaced before the fields of the reply were scored; retry the request"
            )


def field_members(service: Service, params: SamplingParams, num_choices: int) -> FieldMembers | None:
    """Create the `FieldMembers` for a request, or return None if no field in its schema has members.

    Raises:
        ApiError: 400 if `response_format` has no JSON schema or an unsupported one, `logprobs_mode` is
            processed_logprobs, or there are more choices than `max_field_rows`.
    """
    form = None if params.response_format is None else format_args(params.response_format)
    schema = None if form is None else form.json_schema
    if schema is None:
        what = '"members" requires a JSON schema; set response_format to a json_schema, or send true'
        raise bad_request(FIELD, what)
    if params.logprobs_mode == "processed_logprobs":
        what = '"members" requires raw logprobs; set logprobs_mode to raw_logprobs or both, or send true'
        raise bad_request(FIELD, what)
    check_count(service.settings, "max_field_rows", FIELD, num_choices, "choices, which need a row each")
    known = Schema(schema)
    try:
        known.check()
    except ParameterError as error:
        what = str(error).removeprefix(f"{error.parameter}: ")
        raise bad_request(FIELD, f'"members" does not support this schema: {what}; send true') from error
    return FieldMembers(service, num_choices) if known.has_members() else None
