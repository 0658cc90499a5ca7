"""The models of one server: the first model, and further models that are loaded on demand."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from logprobe import runtime
from logprobe.engine.backends.start import start_engine
from logprobe.engine.forward.system_limits import MAX_DEFAULT_BYTES, free_bytes
from logprobe.errors import LogprobeError, require
from logprobe.models import resolve
from logprobe.models.cache import in_words
from logprobe.models.sources import weight_bytes
from logprobe.server.http.decode import BODY, read_bytes
from logprobe.server.http.errors import ApiError, server_full
from logprobe.server.http.replies import while_connected
from logprobe.server.service import ServerState, Service

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request as HttpRequest

    from logprobe.config import EngineConfig
    from logprobe.engine.backends.start import LoadedModel
    from logprobe.server.settings import FurtherModel, ServerSettings

logger = logging.getLogger("logprobe.server")


class _Named(msgspec.Struct):
    """The fields of a body that select the model; the route decodes the rest.

    msgspec skips all other fields without building Python objects for them.
    """

    model: str | None = None
    lora: str | None = None
    lora_name: str | None = None  # in operator routes


class Models(ServerState):
    """The models of a server by name; used in one event loop.

    A further model is loaded when it is first requested, and models are loaded one at a time. If a model does
    not fit, the least recently used models without requests in progress are unloaded. A model that an
    operator has changed is never unloaded, because reloading it would lose the change.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: ServerSettings,
        processors: Sequence[str | type] = (),
        further: Mapping[str, FurtherModel] | None = None,
    ) -> None:
        """Create the first model's service and check the further models.

        Args:
            model: the first model, which answers requests that name no model; the caller closes it.
            settings: settings of the server.
            processors: logits processors of the first model.
            further: additional models by name.

        Raises:
            ParameterError: two models have the same name, a model exceeds `max_models_bytes`, or `preload`
                names an unknown model or more models than fit.
            ModelError: a model cannot be found.
        """
        super().__init__(settings, further or {})
        self.first = Service(model, settings, self, processors)
        self.services[self.first.model_name] = self.first
        self._loads: dict[str, asyncio.Task[Service]] = {}
        self._turn = asyncio.Lock()  # one load at a time
        self._num_users = Counter[str]()  # number of requests in progress, by model
        self._left_s: dict[str, float] = {}  # monotonic time at which each model's latest request ended
        self._room = free_bytes() if settings.max_models_bytes is None else settings.max_models_bytes
        self._sizes = {name: _size_of(one.config) for name, one in self.further.items()}
        self._check()

    def _check(self) -> None:
        known = {*self.first.own_names} | {
            setting.partition("=")[0] for setting in self.settings.lora_modules
        }
        for name, one in self.further.items():
            for own in (name, *one.names, *one.loras):
                require(own not in known, "also_model", f"the name {own!r} is used twice; choose another")
                known.add(own)
            size, room = in_words(self._sizes[name]), in_words(self._room)
            what = f"{name!r} needs {size}, but all models other than the first may use {room} together"
            remedy = (
                "raise max_models_bytes, set a smaller kv_cache_memory_bytes, or use a smaller quantization"
            )
            require(self._sizes[name] <= self._room, "also_model", f"{what}; {remedy}")
        for name in self.settings.preload:
            near = " or ".join(map(repr, self.further)) or "none; add it with also_model"
            require(
                name in self.further,
                "preload",
                f"{name!r} is not a model of --also-model or [models]; known: {near}",
            )
        needed = sum(self._sizes[name] for name in set(self.settings.preload))
        what = f"the models need {in_words(needed)}, but further models may use {in_words(self._room)}"
        require(needed <= self._room, "preload", f"{what}; preload fewer, or raise max_models_bytes")

    def prepare(self) -> None:
        """Load the first model's LoRA adapters and the models in `preload`.

        Raises:
            ModelError: a model or LoRA adapter cannot be read or does not fit.
            ParameterError: two LoRA adapters, or an adapter and a model, have the same name.
        """
        self.first.prepare()
        for name in dict.fromkeys(self.settings.preload):
            self.services[name] = self._started(name)

    def close(self) -> None:
        """Close all engines except the first model's, which belongs to the caller of the constructor."""
        for service in self.loaded[1:]:
            service.close()

    async def enter(self, request: HttpRequest, caller: str) -> Service:
        """Return the model that a request names, loading it if necessary; it stays loaded until `leave`.

        Raises:
            ApiError: 413 (body, which is read for the model's name, too large), 408 (body too slow), 429 (no
                memory for the model at the moment) or 503 (the model cannot be loaded).
            ClientGoneError: the client disconnected before the model was loaded.
        """
        if not self.further:
            return self.first
        name = self._owner_of(await self._named_by(request, caller))
        self._num_users[name] += 1
        try:
            service = self.services.get(name)
            if service is not None:
                return service
            return await while_connected(request.receive, self._awake(name), self.lifetime.check)
        except BaseException:
            self._leave(name)
            raise

    def leave(self, service: Service) -> None:
        """Allow a model to be unloaded again once a request has ended."""
        if self.further:
            self._leave(service.model_name)

    def _leave(self, name: str) -> None:
        self._num_users[name] -= 1
        self._left_s[name] = runtime.monotonic()

    async def _named_by(self, request: HttpRequest, caller: str) -> str | None:
        """Return the model name in a request's query or body; None if absent, or if the body is invalid."""
        if request.method != "POST":
            return request.query_params.get("model")
        request.scope[BODY] = data = await read_bytes(request, self.settings)
        named = await self.workers.read(lambda: named_in(data), len(data), caller)
        return next((name for name in named if name is not None), None)

    def _owner_of(self, name: str | None) -> str:
        """Return the name of the model that owns a name.

        An unknown name belongs to the first model, which rejects it with a 404.
        """
        if name is None:
            return self.first.model_name
        if (service := self.owner_of(name)) is not None:
            return service.model_name
        further = (key for key, one in self.further.items() if name in {key, *one.names, *one.loras})
        return next(further, self.first.model_name)

    async def _awake(self, name: str) -> Service:
        if name not in self._loads:  # concurrent requests share one load, which outlives each of them
            self._loads[name] = asyncio.create_task(self._load(name))
            self._loads[name].add_done_callback(lambda task: self._end_load(name, task))
        return await asyncio.shield(self._loads[name])

    def _end_load(self, name: str, load: asyncio.Task[Service]) -> None:
        del self._loads[name]
        if not load.cancelled():
            load.exception()  # mark as retrieved: every waiting request may have gone

    async def _load(self, name: str) -> Service:
        async with self._turn:
            await self._make_room(name)
            logger.info("loading %s for a request", name)
            try:
                service = await asyncio.to_thread(self._started, name)
            except LogprobeError as error:
                logger.error("cannot load %s: %s", name, error)  # noqa: TRY400 - it says all
                message = f"model {name!r} cannot be loaded; see the server's log"
                raise ApiError(503, message, code="model_not_loaded") from error
            self.services[name] = service
            return service

    async def _make_room(self, name: str) -> None:
        """Unload the least recently used models until the model `name` fits.

        Raises:
            ApiError: 429 if the remaining models are in use or were changed by an operator.
        """
        while self._held() + self._sizes[name] > self._room:
            may_leave = self.services.keys() & self._sizes.keys() - self.changed
            unused = [key for key in may_leave if not self._num_users[key]]
            if not unused:
                raise server_full(f"further models share {in_words(self._room)}; none can be unloaded now")
            longest = min(unused, key=lambda key: self._left_s.get(key, 0.0))
            logger.info("unloading %s to make room for %s", longest, name)
            await asyncio.to_thread(self.services.pop(longest).close)

    def _held(self) -> int:
        return sum(size for name, size in self._sizes.items() if name in self.services)

    def _started(self, name: str) -> Service:
        further = self.further[name]
        model = start_engine(further.config)
        try:
            service = Service(model, further.settings, self, further.config.logits_processors)
            service.prepare()
        except BaseException:
            model.engine.close()
            raise
        return service


def named_in(data: bytes) -> tuple[str | None, ...]:
    """Return a body's `model`, `lora` and `lora_name`, or () if it is not JSON or a name is not a string."""
    try:
        named = msgspec.json.decode(data, type=_Named)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()
    return named.model, named.lora, named.lora_name


def _size_of(config: EngineConfig) -> int:
    """Return the maximum size of a model in bytes: its weight files and its KV caches."""
    given, num_pools = config.cache_config.kv_cache_memory_bytes, config.parallel_config.data_parallel_size
    pool = MAX_DEFAULT_BYTES if given is None else given
    return weight_bytes(resolve(config.model).folder) + num_pools * pool
