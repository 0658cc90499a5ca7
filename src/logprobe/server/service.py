"""State that the routes share: engine, scoring client, limits and metrics; used in one event loop."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import secrets
import time
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from logprobe.analysis.client import ScoringClient
from logprobe.errors import LogprobeError, require, shortened
from logprobe.next_token.fields import SpellingTools
from logprobe.next_token.rows import row_params
from logprobe.records.forms.json import ChatEncoder, IdTexts
from logprobe.sampling import SamplingParams
from logprobe.server.http.errors import ApiError, bad_request, engine_unavailable
from logprobe.server.http.gate import REQUEST_ID, Call
from logprobe.server.http.keys import Keys, OperatorKeys
from logprobe.server.http.replies import Documents, while_connected
from logprobe.server.http.workers import Workers
from logprobe.server.limits import Cost, Lifetime, Limits
from logprobe.server.metrics import Metrics
from logprobe.server.settings import read_confidences, read_response_template
from logprobe.server.stored import StoredResponses
from logprobe.text.channels import template_of
from logprobe.text.chat import chat_template_of, variables_of
from logprobe.text.template_cost import is_cheap

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from starlette.types import Receive

    from logprobe.analysis.confidence import FittedConfidence
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
    """Output of a split's request, and its bytes' log-probability (nats) if a token spans the boundary."""


def _max_token_bytes(text: TextEdge) -> int:
    """Return the maximum number of bytes of input text that one token can represent."""
    vocabulary = text.vocabulary
    longest = max((len(vocabulary.token_bytes(token_id)) for token_id in range(len(vocabulary))), default=1)
    # A normalizer may shorten a text before tokenization; Unicode normalization forms do by a factor <= 3.
    return longest if text.backend.normalizer is None else longest * 3


logger = logging.getLogger("logprobe.server")


MAX_NAME_CHARS = 256  # maximum length of a LoRA adapter's name, which appears in replies and metrics
DEFAULT_NAME = "default"  # alias of the served model


class ChoosesWeights(Protocol):
    """A body that may select a LoRA adapter."""

    model: str | None
    lora: str | None


class ServerState:
    """State shared by all models of a server, and the resolution of names; used in one event loop."""

    first: Service  # answers requests that name no model

    def __init__(self, settings: ServerSettings, further: Mapping[str, FurtherModel]) -> None:
        """Read the API keys, and create the workers and metrics.

        Raises:
            ParameterError: the key file is invalid.
        """
        self.settings = settings
        self.workers = Workers()
        self.keys = Keys(settings)
        self.operator_keys = OperatorKeys(settings)
        self.lifetime = Lifetime(settings.drain_s)
        self.stored = StoredResponses(settings.max_stored, settings.max_stored_bytes, settings.max_body_bytes)
        self.metrics = Metrics(self.engines, by_model=bool(further))
        self.told: set[str] = set()  # ignored fields that have been logged
        self.further = dict(further)
        self.services: dict[str, Service] = {}  # the loaded models, which always include the first model
        self.changed: set[str] = set()  # models that an operator has changed

    @property
    def loaded(self) -> list[Service]:
        """Services of the loaded models, the first model first; thread-safe."""
        return list(self.services.values())

    def engines(self) -> dict[str, Front]:
        """Return the engines of the loaded models by name; thread-safe."""
        return {service.model_name: service.engine for service in self.loaded}

    def names(self) -> frozenset[str]:
        """Return all names of models, without the names of LoRA adapters."""
        return self.first.own_names.union(self.further, *(one.names for one in self.further.values()))

    def has_elsewhere(self, name: str, model_name: str) -> bool:
        """Return True if a model other than `model_name` has a LoRA adapter with this name."""
        others = [one for one in self.loaded if one.model_name != model_name]
        further = [one for key, one in self.further.items() if key != model_name]
        return any(name in one.engine.list_loras() for one in others) or any(
            name in one.loras for one in further
        )

    def served(self) -> list[str]:
        """Return all names that a request may use as `model`."""
        loaded = {service.model_name: [name for name, _ in service.served()] for service in self.loaded}
        return [name for key in [*loaded, *self.asleep()] for name in loaded.get(key, [key])]

    def asleep(self) -> list[str]:
        """Return the names of further models that are not loaded."""
        waiting = ((key, one) for key, one in self.further.items() if key not in self.services)
        return [name for key, one in waiting for name in (key, *one.names)]

    def owner_of(self, name: str) -> Service | None:
        """Return the loaded model that has this name or a LoRA adapter with this name, or None."""
        return next((service for service in self.loaded if service.has_name(name)), None)

    def keep(self, service: Service) -> None:
        """Exempt a model from unloading, because an operator has changed its weights or LoRA adapters."""
        self.changed.add(service.model_name)


class Service:
    """One model served over HTTP, with its LoRA adapters and limits, and the state shared by all models."""

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
        self.tokens: TokenTable = model.text.vocabulary  # token texts in replies
        self.encoder = ChatEncoder(self.tokens)
        self._id_encoder = cache(lambda: ChatEncoder(IdTexts(model.text.vocabulary)))
        self.spelling_tools = cache(lambda: SpellingTools(model))  # slow to create
        self._response_template = read_response_template(settings.response_template)
        self._confidences = read_confidences(settings)
        self.reply_form()  # fail at startup if the template is invalid
        self.limits = Limits(settings)
        # State of one request, set by `for_one_request`.
        self.caller = ""
        self.call = Call("")
        self._tickets: list[Ticket] = []
        self._awaited: Cost | None = None  # cost for which the request has waited and holds a ticket
        self._request_ids: list[str] = []

    def prepare(self) -> None:
        """Load the LoRA adapters in the settings.

        Raises:
            ModelError: an adapter cannot be read or does not fit the model.
            ParameterError: an adapter has a model's name, or a name that is used twice.
        """
        known = self.own_names | self.models.names()
        for setting in self.settings.lora_modules:
            name, _, path = setting.partition("=")
            is_new = name not in known
            require(is_new, "lora_modules", f"{name!r} is a model's name or is used twice; choose another")
            known |= {name}
            self.engine.add_lora(name, path)

    def check_new_name(self, name: str) -> None:
        """Validate the name of a new LoRA adapter.

        Raises:
            ApiError: 400 if the name belongs to a model or to another model's LoRA adapter, is empty or
                longer than `MAX_NAME_CHARS`, or is not printable.
        """
        is_models = name in self.own_names | self.models.names()
        is_taken = is_models or self.models.has_elsewhere(name, self.model_name)
        if not name or is_taken or len(name) > MAX_NAME_CHARS or not name.isprintable():
            what = f"must be 1 to {MAX_NAME_CHARS} printable characters and not in use by another model"
            raise bad_request("lora_name", what)

    def close(self) -> None:
        """Close the engine, unless it is stuck in a step, because its `close` would then block forever."""
        if self.engine.stalled_s() <= self.settings.stall_s:
            self.engine.close()

    def for_one_request(self, caller: str, call: Call) -> Service:
        """Return a copy for one HTTP request; its reserved capacity counts for `caller` until `release`."""
        scoped = copy.copy(self)
        scoped.call = call
        scoped.caller = caller
        scoped._tickets, scoped._request_ids = [], []  # noqa: SLF001 - of the same class
        return scoped

    def write_ids(self) -> None:
        """Show tokens as `token_id:ID` in this request's reply."""
        self.tokens, self.encoder = IdTexts(self.text.vocabulary), self._id_encoder()

    def of_one_call(self) -> Requests:
        """Return a factory whose requests together count as one unit of this caller in fair sharing."""
        return self.client.requests.of_one_call(self.caller)

    def admit(self, requests: Sequence[Request], num_echoes: int = 1, beside: Cost | None = None) -> None:
        """Reserve capacity for requests; thread-safe.

        Args:
            requests: the requests for one reply.
            num_echoes: number of times that the reply contains each prompt.
            beside: additional cost of the reply.

        Raises:
            ApiError: 400 if the cost exceeds a limit.
            NoRoomError: the free capacity is too small.
        """
        self._request_ids += [request.request_id for request in requests]
        cost = Cost.of(requests, self.vocab_size, num_echoes)
        if any(request.params.return_routed_experts for request in requests):
            cost += Cost.of_routes(requests, self.capabilities.shape)
        cost = cost if beside is None else cost + beside
        if self._awaited is not None:
            if cost == self._awaited:
                return
            self.release()  # the cost has changed while waiting, for example with the weights
        self._tickets.append(self.limits.admit(cost, self.caller, requests))

    @property
    def has_waited(self) -> bool:
        """True if this request has waited for capacity, in which case its body is decoded a second time."""
        return self._awaited is not None

    async def wait_for_room(self, cost: Cost, receive: Receive) -> None:
        """Wait in the caller's queue, and reserve capacity, which `admit` then uses for the request.

        Raises:
            ApiError: 429 if the queue is full or the wait timed out, or 503 if the server or engine has
                stopped.
            ClientGoneError: the client disconnected.
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
        """Reserve capacity for a reply of `num_bytes`, unless the request has already reserved capacity.

        Raises:
            ApiError: 400 if the reply exceeds the limit, or 429 if the free capacity is too small.
        """
        if not self._tickets:
            cost = Cost(requests=0, tokens=0, logprob_bytes=num_bytes)
            self._tickets.append(self.limits.admit(cost, self.caller))

    def release(self) -> None:
        """Release all capacity that this request has reserved."""
        for ticket in self._tickets:
            ticket.release()

    @staticmethod
    def now() -> int:
        """Return the Unix time in seconds, for replies."""
        return int(time.time())

    def log_body(self, route: str, body: msgspec.Struct) -> None:
        """Log a request's body if `enable_log_requests` is set."""
        if self.settings.enable_log_requests and not self.has_waited:
            logger.info("%s %s", route, msgspec.json.encode(body).decode())

    @staticmethod
    def new_id(prefix: str) -> str:
        """Return a unique id that cannot be guessed: without API keys, the id gives access to a response."""
        return f"{prefix}-{secrets.token_hex(16)}"

    def reply_id(self, prefix: str, request_id: str | None) -> str:
        """Return the id of a reply, which ends with the `request_id` that the client chose, as in vLLM.

        Raises:
            ApiError: 400 if `request_id` has characters other than printable ASCII, or is too long.
        """
        if request_id is None:
            return self.new_id(prefix)
        if not REQUEST_ID.fullmatch(request_id):
            raise bad_request("request_id", "must be 1 to 128 printable ASCII characters without spaces")
        return f"{prefix}-{request_id}"

    def request_template(self, body: msgspec.Struct) -> str | None:
        """Return the chat template of a body; None if it has none, or the server does not allow it."""
        template: str | None = getattr(body, "chat_template", None)
        return template if self.settings.trust_request_chat_template else None

    def template_variables(self, body: msgspec.Struct) -> frozenset[str]:
        """Return the variables in the chat template for a body; empty without a valid template."""
        template = self.request_template(body) or chat_template_of(self.text.template_source)
        if template is None:
            return frozenset()
        from jinja2 import TemplateSyntaxError

        try:
            return variables_of(template)
        except TemplateSyntaxError:
            return frozenset()  # requests that render the template get the error

    def renders_quickly(self, body: msgspec.Struct) -> bool:
        """Return True if a body has no conversation, or one whose rendering time is bounded by its size."""
        if getattr(body, "chat_template", None) is not None:
            return False
        if getattr(body, "messages", None) is None and getattr(body, "input", None) is None:
            return True
        template = chat_template_of(self.text.template_source)
        return template is None or is_cheap(template)

    def reply_form(self) -> ResponseForm | None:
        """Return the format of the model's replies, or None if unknown; replies are then all content.

        Raises:
            ParameterError: the `response_template` setting is invalid.
        """
        return template_of(self.text, self._response_template)

    def check_model(self, name: str | None) -> None:
        """Reject a name that belongs to no served model or LoRA adapter; None means the default model.

        Raises:
            ApiError: 404 if the name is unknown.
        """
        if name is None or self.models.owner_of(name) is not None:
            return
        served = self.models.served()
        if name not in served:
            message = f"model {shortened(name)!r} is not served; use {' or '.join(map(repr, served))}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def has_name(self, name: str) -> bool:
        """Return True if this model or one of its LoRA adapters has this name."""
        return name in self.own_names or name in self.engine.list_loras()

    def served(self) -> list[tuple[str, str | None]]:
        """Return (name, folder) pairs: the model's names, with folder None, then its LoRA adapters."""
        own = dict.fromkeys([self.model_name, *filter(None, self.settings.served_model_name)])
        return [*((name, None) for name in own), *self.engine.list_loras().items()]

    def confidence_named(self, name: str) -> FittedConfidence:
        """Return the confidence fit with this name.

        Raises:
            ApiError: 400 if there is none.
        """
        if name not in self._confidences:
            known = ", ".join(self._confidences) or "none; start the server with --confidence NAME=FILE"
            raise bad_request(
                "confidence", f"no confidence fit {shortened(name)!r} is loaded; known: {known}"
            )
        return self._confidences[name]

    def choose_weights(self, body: ChoosesWeights) -> None:
        """Resolve a body's `model` and `lora`, set `body.lora`, and record the answering model in `call`.

        Raises:
            ApiError: 404 if the model is not served, or 400 if `model` and `lora` name different adapters.
            ParameterError: the LoRA adapter is not loaded.
        """
        self.check_model(body.model)
        if body.model is not None and body.model not in self.own_names:
            if body.lora not in {None, body.model}:
                message = f"is {shortened(body.lora or '')!r}, but model selects LoRA weights {body.model!r}"
                raise bad_request("lora", message)
            body.lora = body.model
        if body.lora is not None:
            self.engine.lora_number(body.lora)
        # Set after validation, because metrics and the log show this name, which must not be arbitrary input.
        self.call.model = self.name_of(body)

    def check_engine(self) -> None:
        """Check that the engine is running and not stuck, and that the server is not shut down.

        Raises:
            ApiError: 503 if one of these conditions does not hold.
        """
        self.lifetime.check()
        stalled_s = self.engine.stalled_s(self._request_ids)
        if stalled_s > self.settings.stall_s:
            if not (stats := self.engine.stats()).is_up:
                raise engine_unavailable(stats.why_down)
            is_gone = math.isinf(stalled_s)
            what = "has stopped" if is_gone else f"has been busy with one step for {stalled_s:.0f} s"
            code = "engine_closed" if is_gone else "engine_stuck"
            message = f"the engine {what}; restart the server"
            if stats.why_down:  # an engine process, which will be restarted unless it recovers
                message = f"{stats.why_down}; retry the request later"
            raise ApiError(503, message, code=code)

    def name_of(self, body: ChoosesWeights) -> str:
        """Return the `model` field for replies: the LoRA adapter's name if one is used, else the model's."""
        return body.lora or self.model_name

    @staticmethod
    def params_for(
        body: ChoosesWeights, *, max_tokens: int, prompt_logprobs: int | None = None, **reports: Any
    ) -> SamplingParams:
        """Return default parameters with these limits and reports, and the LoRA adapter of a body."""
        return SamplingParams(
            max_tokens=max_tokens, prompt_logprobs=prompt_logprobs, lora=body.lora, **reports
        )

    async def run_all(self, admitted: Sequence[Admitted]) -> list[RequestOutput]:
        """Run requests and return their outputs in order; cancelling the call aborts the requests.

        Raises:
            LogprobeError: a request failed; the others were aborted.
        """
        try:
            with self.engine.submitted(admitted):
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._result(request)) for request in admitted]
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__  # keep the cause, which tells client errors from ours
        return [task.result() for task in tasks]

    async def run_splits(
        self,
        splits: Sequence[Split],
        admitted: Sequence[Admitted],
        requests: Requests,
        sampling: SamplingParams | None = None,
    ) -> list[SplitResult]:
        """Run the requests of splits, and return each output.

        If a token spans the boundary, the output comes with the log-probability of the split's bytes (nats).

        Raises:
            LogprobeError: a request failed; the others were aborted.
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
        """Run requests with one sample each; `follow` may stop any of them early.

        Raises:
            LogprobeError: a request failed.
        """
        outputs = await self.client.run(admitted, None, follow)
        for output in outputs:
            self.ended(output)
        error = next((output.error for output in outputs if output.error is not None), None)
        if error is not None:
            raise error
        return outputs

    async def results(self, admitted: Sequence[Admitted]) -> AsyncGenerator[RequestOutput]:
        """Yield outputs in request order, each as soon as it and all earlier outputs are complete.

        Closing the generator aborts the remaining requests.

        Raises:
            LogprobeError: a request failed.
        """
        with self.engine.submitted(admitted):
            tasks = deque(asyncio.create_task(self._result(request)) for request in admitted)
            try:
                while tasks:
                    yield await tasks.popleft()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def rows(self, requests: Requests, prefixes: Sequence[IntArray], lora: str | None) -> list[Row]:
        """Return the next-token log-probabilities, (vocab_size,) nats each, after prefixes.

        The tokens of the prefixes are not counted in this request's log line.

        Raises:
            LogprobeError: a request failed; the others were aborted.
        """
        admitted = [requests.admit(ids, row_params(lora), wants_row=True) for ids in prefixes]
        uncounted = copy.copy(self)
        uncounted.call = Call("")
        outputs = await uncounted.run_all(admitted)
        return [row for output in outputs if (row := output.outputs[0].row) is not None]

    def ended(self, output: RequestOutput) -> None:
        """Count a finished engine request in the metrics and in the HTTP request's log line."""
        self.metrics.ended(output)
        self.call.note_output(output)

    async def _result(self, admitted: Admitted) -> RequestOutput:
        output = await self.engine.result(admitted.request.request_id)
        self.ended(output)
        if output.error is not None:
            raise output.error
        return output
