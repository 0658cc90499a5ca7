"""What the routes share: the engine and its client, limits, metrics; used from one event loop."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import secrets
import time
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from logprobe.analysis.client import ScoringClient
from logprobe.errors import LogprobeError, require, shortened
from logprobe.next_token.fields import SpellingTools
from logprobe.next_token.rows import row_params
from logprobe.records.forms.json import ChatEncoder, IdTexts
from logprobe.sampling import SamplingParams
from logprobe.server.http.errors import ApiError, bad_request, engine_unavailable
from logprobe.server.http.gate import Call
from logprobe.server.http.keys import Keys, OperatorKeys
from logprobe.server.http.replies import Documents, while_connected
from logprobe.server.http.workers import Workers
from logprobe.server.limits import Cost, Lifetime, Limits
from logprobe.server.metrics import Metrics
from logprobe.server.settings import read_response_template
from logprobe.server.stored import StoredResponses
from logprobe.text.channels import template_of
from logprobe.text.chat import chat_template_of, variables_of
from logprobe.text.template_cost import is_cheap

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from starlette.types import Receive

    from logprobe.engine.backends.start import LoadedModel
    from logprobe.engine.client import Follow
    from logprobe.engine.front import Front
    from logprobe.engine.request import RequestOutput, Requests
    from logprobe.next_token.rows import Row
    from logprobe.records.values import IntArray, TokenTable
    from logprobe.server.limits import Ticket
    from logprobe.server.settings import FurtherModel, ServerSettings
    from logprobe.text.boundary import Split
    from logprobe.text.channels import ResponseForm
    from logprobe.text.edge import TextEdge
    from logprobe.transport.messages import Admitted, Request

    SplitResult: TypeAlias = tuple[RequestOutput, float | None]
    """What a split came to, and the sum over its bytes where it has healing, nats."""


def _max_token_bytes(text: TextEdge) -> int:
    """The bytes of text that one token can stand for, at most."""
    vocabulary = text.vocabulary
    longest = max((len(vocabulary.token_bytes(token_id)) for token_id in range(len(vocabulary))), default=1)
    # A normaliser may write a text shorter before it is cut into tokens; Unicode's forms do so by up to 3.
    return longest if text.backend.normalizer is None else longest * 3


logger = logging.getLogger("logprobe.server")


MAX_NAME_CHARS = 256  # of LoRA weights, which replies and figures repeat
DEFAULT_NAME = "default"  # means the model that is served, whatever its name


class ChoosesWeights(Protocol):
    """A body that may choose LoRA weights."""

    model: str | None
    lora: str | None


class ServerState:
    """What all models of a server share, and what their names mean; used from one event loop."""

    first: Service  # answers where a request names no model

    def __init__(self, settings: ServerSettings, further: Mapping[str, FurtherModel]) -> None:
        """Read the keys, and start the workers and figures.

        Raises:
            ParameterError: the file of keys cannot be used.
        """
        self.settings = settings
        self.workers = Workers()
        self.keys = Keys(settings)
        self.operator_keys = OperatorKeys(settings)
        self.lifetime = Lifetime(settings.drain_s)
        self.stored = StoredResponses(settings.max_stored, settings.max_stored_bytes, settings.max_body_bytes)
        self.metrics = Metrics(self.engines, by_model=bool(further))
        self.told: set[str] = set()  # fields without effect that the log has named
        self.further = dict(further)
        self.services: dict[str, Service] = {}  # of models that are loaded; the first one stays
        self.changed: set[str] = set()  # models that an operator has changed

    @property
    def loaded(self) -> list[Service]:
        """Those that answer now, the first one first; from any thread."""
        return list(self.services.values())

    def engines(self) -> dict[str, Front]:
        """Their engines by name; from any thread."""
        return {service.model_name: service.engine for service in self.loaded}

    def names(self) -> frozenset[str]:
        """All names that mean a model, LoRA weights left out."""
        return self.first.own_names.union(self.further, *(one.names for one in self.further.values()))

    def has_elsewhere(self, name: str, model_name: str) -> bool:
        """Whether LoRA weights of another model than this one have a name."""
        others = [one for one in self.loaded if one.model_name != model_name]
        further = [one for key, one in self.further.items() if key != model_name]
        return any(name in one.engine.list_loras() for one in others) or any(
            name in one.loras for one in further
        )

    def served(self) -> list[str]:
        """What a request may name."""
        loaded = {service.model_name: [name for name, _ in service.served()] for service in self.loaded}
        return [name for key in [*loaded, *self.asleep()] for name in loaded.get(key, [key])]

    def asleep(self) -> list[str]:
        """Names of further models that are not loaded."""
        waiting = ((key, one) for key, one in self.further.items() if key not in self.services)
        return [name for key, one in waiting for name in (key, *one.names)]

    def owner_of(self, name: str) -> Service | None:
        """The loaded model that a name means, or whose LoRA weights it means."""
        return next((service for service in self.loaded if service.has_name(name)), None)

    def keep(self, service: Service) -> None:
        """Tell that an operator has changed a model's weights, or has loaded or dropped LoRA weights."""
        self.changed.add(service.model_name)


class Service:
    """One model behind HTTP, with its LoRA weights, its own limits, and what it shares with `models`."""

    def __init__(
        self,
        model: LoadedModel,
        settings: ServerSettings,
        models: ServerState,
        processors: Sequence[str | type] = (),
    ) -> None:
        self.models = models
        self.keys, self.lifetime, self.metrics = models.keys, models.lifetime, models.metrics
        self.stored, self.workers = models.stored, models.workers
        self.processors = processors
        self.loaded = model
        self.engine = model.engine
        self.text = model.text
        self.client = ScoringClient(model.engine, model.text)
        self.settings = settings
        self.documents = Documents(self.workers)
        self.max_token_bytes = _max_token_bytes(model.text)
        self.capabilities = model.engine.capabilities()
        self.vocab_size = self.capabilities.vocab_size
        names = [settings.model_name, *settings.served_model_name, self.capabilities.model]
        self.model_name = next(name for name in names if name)
        self.own_names = frozenset({self.model_name, *filter(None, names), DEFAULT_NAME})
        self.created = int(time.time())
        self.tokens: TokenTable = model.text.vocabulary  # what replies write tokens by
        self.encoder = ChatEncoder(self.tokens)
        self._id_encoder = cache(lambda: ChatEncoder(IdTexts(model.text.vocabulary)))
        self.spelling_tools = cache(lambda: SpellingTools(model))  # which take a while
        self._response_template = read_response_template(settings.response_template)
        self.reply_form()  # one that cannot be used is told at the start
        self.limits = Limits(settings)
        # Of one request: who asks, what it comes to, and what it was admitted for.
        self.caller = ""
        self.call = Call("")
        self._tickets: list[Ticket] = []
        self._awaited: Cost | None = None  # what it has waited for, and has a ticket for
        self._request_ids: list[str] = []

    def prepare(self) -> None:
        """Load the LoRA weights that the settings name.

        Raises:
            ModelError: a folder cannot be read, or does not fit the model.
            ParameterError: a name is the model's own, or given twice.
        """
        known = self.own_names | self.models.names()
        for setting in self.settings.lora:
            name, _, path = setting.partition("=")
            is_new = name not in known
            require(is_new, "lora", f"{name!r} is the model's own name, or given twice; choose another")
            known |= {name}
            self.engine.add_lora(name, path)

    def check_new_name(self, name: str) -> None:
        """Refuse a name for LoRA weights that means the model itself.

        Raises:
            ApiError: 400.
        """
        is_models = name in self.own_names | self.models.names()
        is_taken = is_models or self.models.has_elsewhere(name, self.model_name)
        if not name or is_taken or len(name) > MAX_NAME_CHARS or not name.isprintable():
            what = f"must be 1 to {MAX_NAME_CHARS} printable characters, and no model's own name"
            raise bad_request("lora_name", what)

    def close(self) -> None:
        """Close the engine, unless it hangs in a step: that one would never close."""
        if self.engine.stalled_s() <= self.settings.stall_s:
            self.engine.close()

    def for_one_request(self, caller: str, call: Call) -> Service:
        """This service as one HTTP request sees it: what it admits counts for its caller until `release`."""
        scoped = copy.copy(self)
        scoped.call = call
        scoped.caller = caller
        scoped._tickets, scoped._request_ids = [], []  # noqa: SLF001 - of the same class
        return scoped

    def write_ids(self) -> None:
        """Have this one request's rows name each token by its id."""
        self.tokens, self.encoder = IdTexts(self.text.vocabulary), self._id_encoder()

    def of_one_call(self) -> Requests:
        """A maker of engine requests that count as one call of whoever asks."""
        return self.client.requests.of_one_call(self.caller)

    def admit(self, requests: Sequence[Request], num_echoes: int = 1, beside: Cost | None = None) -> None:
        """Take requests, whose reply has each prompt so often, into the server's limits; any thread may ask.

        `beside` is what the reply costs but for them.

        Raises:
            ApiError: 400 beyond a limit.
            NoRoomError: there is no room now.
        """
        self._request_ids += [request.request_id for request in requests]
        cost = Cost.of(requests, self.vocab_size, num_echoes)
        cost = cost if beside is None else cost + beside
        if self._awaited is not None:
            if cost == self._awaited:
                return
            self.release()  # weights or their limits have changed since
        self._tickets.append(self.limits.admit(cost, self.caller))

    @property
    def has_waited(self) -> bool:
        """Whether this request has waited for room, and is read for the second time."""
        return self._awaited is not None

    async def wait_for_room(self, cost: Cost, receive: Receive) -> None:
        """Wait in the caller's queue until there is room for a request, whose `admit` then takes it.

        Raises:
            ApiError: 429, the queue is full or there was no room in time; 503 the server or the engine ends.
            ClientGoneError: the client hung up.
        """
        with self.metrics.queued.track_inprogress():
            await while_connected(receive, self._take_room(cost), self._check_waiting)

    async def _take_room(self, cost: Cost) -> None:
        self._tickets.append(await self.limits.wait(cost, self.caller))
        self._awaited = cost

    def _check_waiting(self) -> None:
        self.lifetime.check_open()
        self.check_engine()

    def hold(self, num_bytes: int) -> None:
        """Take a reply of so many bytes into the limits, where nothing else of its request counts.

        Raises:
            ApiError: 429 no room now.
        """
        if not self._tickets:
            cost = Cost(requests=0, tokens=0, logprob_bytes=num_bytes)
            self._tickets.append(self.limits.admit(cost, self.caller))

    def release(self) -> None:
        """Give back all that this request has taken."""
        for ticket in self._tickets:
            ticket.release()

    @staticmethod
    def now() -> int:
        """Seconds since 1970, as replies carry them."""
        return int(time.time())

    def log_body(self, route: str, body: msgspec.Struct) -> None:
        """Log a request's body, only where the operator asked for that."""
        if self.settings.log_requests and not self.has_waited:
            logger.info("%s %s", route, msgspec.json.encode(body).decode())

    @staticmethod
    def new_id(prefix: str) -> str:
        """An id that no other reply has, and that nobody can guess: who knows it may read what is stored."""
        return f"{prefix}-{secrets.token_hex(16)}"

    def template_variables(self) -> frozenset[str]:
        """The variables that the model's chat template reads; none where it has no template."""
        template = chat_template_of(self.text.tokenizer)
        if template is None:
            return frozenset()
        from jinja2 import TemplateSyntaxError

        try:
            return variables_of(template)
        except TemplateSyntaxError:
            return frozenset()  # whoever lays something out by it is told

    def renders_quickly(self, body: msgspec.Struct) -> bool:
        """Return True if a body has no conversation, or its size bounds the time of the chat template."""
        if getattr(body, "messages", None) is None and getattr(body, "input", None) is None:
            return True
        template = chat_template_of(self.text.tokenizer)
        return template is None or is_cheap(template)

    def reply_form(self) -> ResponseForm | None:
        """How the model writes its replies; None where that is not known, and all of one is content.

        Raises:
            ParameterError: the settings' response template is none.
        """
        return template_of(self.text, self._response_template)

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; None is the one that is, LoRA weights go by their name.

        Raises:
            ApiError: 404.
        """
        if name is None or self.models.owner_of(name) is not None:
            return
        served = self.models.served()
        if name not in served:
            message = f"model {shortened(name)!r} is not served here; use {' or '.join(map(repr, served))}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def has_name(self, name: str) -> bool:
        """Whether a name means this model, or LoRA weights of its own."""
        return name in self.own_names or name in self.engine.list_loras()

    def served(self) -> list[tuple[str, str | None]]:
        """The names to ask for: the model's own (None), then those of LoRA weights, each with its folder."""
        own = dict.fromkeys([self.model_name, *filter(None, self.settings.served_model_name)])
        return [*((name, None) for name in own), *self.engine.list_loras().items()]

    def choose_weights(self, body: ChoosesWeights) -> None:
        """Set the LoRA weights of a body, which `model` may name, too, and note in `call` what answers.

        Raises:
            ApiError: 404 for a model that is not served, 400 where `model` and `lora` name different ones.
            ParameterError: no such LoRA weights are loaded.
        """
        self.check_model(body.model)
        if body.model is not None and body.model not in self.own_names:
            if body.lora not in {None, body.model}:
                message = f"is {shortened(body.lora or '')!r}, but model names the lora {body.model!r}"
                raise bad_request("lora", message)
            body.lora = body.model
        if body.lora is not None:
            self.engine.lora_number(body.lora)
        # Only now: it labels figures and stands in the log, where no name that a client invents may go.
        self.call.model = self.name_of(body)

    def check_engine(self) -> None:
        """Notice an engine that has stopped, or that hangs in a step, and that the server has ended.

        Raises:
            ApiError: 503.
        """
        self.lifetime.check()
        stalled_s = self.engine.stalled_s(self._request_ids)
        if stalled_s > self.settings.stall_s:
            if not (stats := self.engine.stats()).is_up:
                raise engine_unavailable(stats.why_down)
            is_gone = math.isinf(stalled_s)
            what = "has stopped" if is_gone else f"has been busy with one step for {stalled_s:.0f} s"
            code = "engine_closed" if is_gone else "engine_stuck"
            message = f"the engine {what}; the server must be started again"
            if stats.why_down:  # a process, which is replaced unless it goes on
                message = f"{stats.why_down}; repeat the request later"
            raise ApiError(503, message, code=code)

    def name_of(self, body: ChoosesWeights) -> str:
        """What replies call the weights that answered: LoRA weights go by their own name."""
        return body.lora or self.model_name

    @staticmethod
    def params_for(
        body: ChoosesWeights, *, max_tokens: int, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """What a request on the weights that a body chose asks of them, where the body asks for no more."""
        return SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs, lora=body.lora)

    async def run_all(self, admitted: Sequence[Admitted]) -> list[RequestOutput]:
        """The outputs of some requests once all have ended; giving up the wait gives them up.

        Raises:
            LogprobeError: one failed; the others were given up.
        """
        self.engine.submit(admitted)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._result(request)) for request in admitted]
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__  # which says whose mistake it was
        return [task.result() for task in tasks]

    async def run_splits(
        self,
        splits: Sequence[Split],
        admitted: Sequence[Admitted],
        requests: Requests,
        sampling: SamplingParams | None = None,
    ) -> list[SplitResult]:
        """`run_all` of what was admitted of some splits, each with the sum over its bytes if it has healing.

        Raises:
            LogprobeError: one failed; the others were given up.
        """
        outputs = await self.run_all(admitted)
        lora = admitted[0].request.params.lora
        healed = await self.client.heal(splits, outputs, lora, requests, sampling)
        results: list[SplitResult] = []
        for output, number in zip(outputs, healed, strict=True):
            if isinstance(number, LogprobeError):
                raise number
            results.append((output, number))
        return results

    async def run_until(self, admitted: Sequence[Admitted], follow: Follow) -> list[RequestOutput]:
        """`run_all` of requests of one sample each, any of which `follow` may end early.

        Raises:
            LogprobeError: one failed.
        """
        outputs = await self.client.run(admitted, None, follow)
        for output in outputs:
            self.ended(output)
        error = next((output.error for output in outputs if output.error is not None), None)
        if error is not None:
            raise error
        return outputs

    async def results(self, admitted: Sequence[Admitted]) -> AsyncGenerator[RequestOutput]:
        """The outputs of some requests in their order, each once it has ended; to leave gives the rest up.

        Raises:
            LogprobeError: one failed.
        """
        self.engine.submit(admitted)
        tasks = deque(asyncio.create_task(self._result(request)) for request in admitted)
        try:
            while tasks:
                yield await tasks.popleft()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def rows(self, requests: Requests, prefixes: Sequence[IntArray], lora: str | None) -> list[Row]:
        """The next-token rows (V,) after some prefixes, nats; no tokens of the reply, whatever that is.

        Raises:
            LogprobeError: one failed; the others were given up.
        """
        admitted = [requests.admit(ids, row_params(lora), wants_row=True) for ids in prefixes]
        uncounted = copy.copy(self)
        uncounted.call = Call("")
        outputs = await uncounted.run_all(admitted)
        return [row for output in outputs if (row := output.outputs[0].row) is not None]

    def ended(self, output: RequestOutput) -> None:
        """Count an engine request that has ended."""
        self.metrics.ended(output)
        self.call.note_output(output)

    async def _result(self, admitted: Admitted) -> RequestOutput:
        output = await self.engine.result(admitted.request.request_id)
        self.ended(output)
        if output.error is not None:
            raise output.error
        return output
