"""What else might have stood in the values of a reply: next-token rows, asked once a choice has ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from logprobe.analysis.schemas import Schema
from logprobe.engine.request import Completions
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

ROWS_AT_ONCE: Final = 16  # of one reply
REQUESTS_PART: Final = 4  # one in this many of what the server lets through may be such rows
FIELD: Final = "field_logprobs"


@dataclass(frozen=True, slots=True)
class FoundFields:
    """The values of one choice, whose whole text is JSON."""

    text: str
    fields: list[FieldDistribution]

    @property
    def num_entries(self) -> int:
        """Values and members, as what a reply writes is counted."""
        return sum(1 + len(one.members.values) for one in self.fields if one.members is not None)


class FieldMembers:
    """Asks for the rows of a reply's values, one choice after another, each as many as any other."""

    def __init__(self, service: Service, num_choices: int) -> None:
        settings = service.settings
        self._service = service
        self._max_rows = settings.max_field_rows // num_choices
        self._at_once = min(ROWS_AT_ONCE, self._max_rows, max(settings.max_requests // REQUESTS_PART, 1))
        self.cost = Cost.of_rows(self._max_rows * num_choices, self._at_once, service.vocab_size)
        self._requests = service.of_one_call()
        self._turn = asyncio.Lock()

    async def found(self, output: RequestOutput, index: int, admitted: Admitted) -> FoundFields | None:
        """The values of a completion that has ended; None where its text is no whole JSON.

        Raises:
            WeightsReplacedError: it was written by weights that answer no longer.
            LogprobeError: a row failed; the others were given up.
        """
        service, completion = self._service, output.outputs[index]
        text = service.text.text_of(completion.token_ids, completion.num_text_bytes)
        whole = replace(output, outputs=Completions([replace(completion, text=text)]))
        async with self._turn:
            sums = await service.workers.write(partial(self._sums, whole, admitted), None)
            if sums is None:
                return None
            while asks := await service.workers.write(partial(sums.next_asks, self._at_once), None):
                prefixes = {ask.token_ids.tobytes(): ask.token_ids for ask in asks}
                try:
                    found = await service.rows(self._requests, list(prefixes.values()), sums.lora)
                finally:  # LoRA weights that are gone are unknown by now
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
            return None  # it ended before its JSON did

    def _check_loads(self, output: RequestOutput, admitted: Admitted) -> None:
        """Refuse to read other weights than those that wrote the reply."""
        engine, lora = self._service.engine, admitted.request.params.lora
        is_same = engine.weights_number == output.weights_number
        if lora is not None:
            try:
                is_same &= engine.lora_number(lora) == admitted.lora_number
            except ParameterError:  # there are no such weights any more
                is_same = False
        if not is_same:
            raise WeightsReplacedError(
                "the weights were replaced before a reply's fields were read; ask again"
            )


def field_members(service: Service, params: SamplingParams, num_choices: int) -> FieldMembers | None:
    """What asks for the members of the values of a reply; None where its schema names none.

    Raises:
        ApiError: 400, there is no schema, or none that can be followed; the rows are not the model's own; so
            many choices have no row each.
    """
    form = None if params.response_format is None else format_args(params.response_format)
    schema = None if form is None else form.json_schema
    if schema is None:
        what = (
            '"members" are those that a JSON schema names: give response_format json_schema, or ask for true'
        )
        raise bad_request(FIELD, what)
    if params.logprobs_mode == "processed_logprobs":
        what = '"members" are read beside raw rows: give logprobs_mode raw_logprobs or both, or ask for true'
        raise bad_request(FIELD, what)
    check_count(service.settings, "max_field_rows", FIELD, num_choices, "choices, each of a row or more")
    known = Schema(schema)
    try:
        known.check()
    except ParameterError as error:
        what = str(error).removeprefix(f"{error.parameter}: ")
        raise bad_request(
            FIELD, f'"members" cannot be read off the schema, which {what}; or ask for true'
        ) from error
    return FieldMembers(service, num_choices) if known.has_members() else None
