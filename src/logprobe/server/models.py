"""The models of one server: the first one, and others that are loaded when a request names them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

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
    """Fields of a body that name the model that answers; its route reads the rest.

    Names alone are read: a value of another type is skipped in the bytes, and never built.
    """

    model: str | None = None
    lora: str | None = None
    lora_name: str | None = None  # of operators' routes


class Models(ServerState):
    """The models of a server by their names; used from one event loop.

    A further model is loaded when it is first asked for, in turn. Where it does not fit beside those that are
    loaded, the one that nothing uses, and nothing has used longest, leaves; one that an operator has changed
    stays, since it would come back as it was opened.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: ServerSettings,
        processors: Sequence[str | type] = (),
        further: Mapping[str, FurtherModel] | None = None,
    ) -> None:
        """`model` is the one that answers where a request names none; `processors` are its own.

        Raises:
            ParameterError: two models have one name, or one is too large for what all may hold.
            ModelError: one cannot be found.
        """
        super().__init__(settings, further or {})
        self.first = Service(model, settings, self, processors)
        self.services[self.first.model_name] = self.first
        self._loads: dict[str, asyncio.Task[Service]] = {}
        self._turn = asyncio.Lock()  # of what is loaded
        self._num_users = Counter[str]()
        self._left_s: dict[str, float] = {}  # when its last user left
        self._room = free_bytes() if settings.max_models_bytes is None else settings.max_models_bytes
        self._sizes = {name: _size_of(one.config) for name, one in self.further.items()}
        self._check()

    def _check(self) -> None:
        known = {*self.first.own_names} | {setting.partition("=")[0] for setting in self.settings.lora}
        for name, one in self.further.items():
            for own in (name, *one.names, *one.loras):
                require(own not in known, "also_model", f"{own!r} stands twice; choose other names")
                known.add(own)
            size, room = in_words(self._sizes[name]), in_words(self._room)
            what = f"{name!r} takes {size}, and the models beside the first may hold {room} together"
            remedy = "raise max_models_bytes, give it a smaller kv_bytes, or use weights of fewer bits"
            require(self._sizes[name] <= self._room, "also_model", f"{what}; {remedy}")
        for name in self.settings.preload:
            near = " or ".join(map(repr, self.further)) or "none; name it by also_model"
            require(name in self.further, "preload", f"{name!r} is no further model; there is {near}")
        needed = sum(self._sizes[name] for name in set(self.settings.preload))
        what = f"take {in_words(needed)}, of the {in_words(self._room)} that further models may hold"
        require(needed <= self._room, "preload", f"{what}; name fewer, or raise max_models_bytes")

    def prepare(self) -> None:
        """Load what has to be there before the first request: LoRA weights, and models to preload.

        Raises:
            ModelError: a model, or LoRA weights, cannot be read or do not fit.
            ParameterError: LoRA weights have the model's own name, or stand twice.
        """
        self.first.prepare()
        for name in dict.fromkeys(self.settings.preload):
            self.services[name] = self._started(name)

    def close(self) -> None:
        """Close every engine but the first one's, which whoever opened it closes."""
        for service in self.loaded[1:]:
            service.close()

    async def enter(self, request: HttpRequest, caller: str) -> Service:
        """The model that a caller's request names, loaded if need be; it stays until `leave`.

        Raises:
            ApiError: 413, 408 for its body; 429 no room for the model now; 503 it cannot be loaded.
            ClientGoneError: the client hung up before it was there.
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
        """Tell that a request of a model has ended."""
        if self.further:
            self._leave(service.model_name)

    def _leave(self, name: str) -> None:
        self._num_users[name] -= 1
        self._left_s[name] = time.monotonic()

    async def _named_by(self, request: HttpRequest, caller: str) -> str | None:
        """What a request's query or body names; a body that cannot be read is its route's to refuse."""
        if request.method != "POST":
            return request.query_params.get("model")
        request.scope[BODY] = data = await read_bytes(request, self.settings)
        named = await self.workers.read(lambda: named_in(data), len(data), caller)
        return next((name for name in named if name is not None), None)

    def _owner_of(self, name: str | None) -> str:
        """The model that a name means, or the first one, which tells who asks that there is none."""
        if name is None:
            return self.first.model_name
        if (service := self.owner_of(name)) is not None:
            return service.model_name
        further = (key for key, one in self.further.items() if name in {key, *one.names, *one.loras})
        return next(further, self.first.model_name)

    async def _awake(self, name: str) -> Service:
        if name not in self._loads:  # one for all who ask meanwhile, whoever of them leaves
            self._loads[name] = asyncio.create_task(self._load(name))
            self._loads[name].add_done_callback(lambda task: self._end_load(name, task))
        return await asyncio.shield(self._loads[name])

    def _end_load(self, name: str, load: asyncio.Task[Service]) -> None:
        del self._loads[name]
        if not load.cancelled():
            load.exception()  # is told to whoever still waits, who may be nobody

    async def _load(self, name: str) -> Service:
        async with self._turn:
            await self._make_room(name)
            logger.info("loading %s, which was asked for", name)
            try:
                service = await asyncio.to_thread(self._started, name)
            except LogprobeError as error:
                logger.error("%s cannot be loaded: %s", name, error)  # noqa: TRY400 - it says all
                message = f"model {name!r} cannot be loaded; the server's log says why"
                raise ApiError(503, message, code="model_not_loaded") from error
            self.services[name] = service
            return service

    async def _make_room(self, name: str) -> None:
        """Let models go until one fits.

        Raises:
            ApiError: 429, the others are in use.
        """
        while self._held() + self._sizes[name] > self._room:
            may_leave = self.services.keys() & self._sizes.keys() - self.changed
            unused = [key for key in may_leave if not self._num_users[key]]
            if not unused:
                raise server_full(f"{in_words(self._room)} of models are loaded, and all are in use or kept")
            longest = min(unused, key=lambda key: self._left_s.get(key, 0.0))
            logger.info("%s leaves memory to %s", longest, name)
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
    """Return what a body calls its model; nothing where it is not JSON, or a name is not a string."""
    try:
        named = msgspec.json.decode(data, type=_Named)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()
    return named.model, named.lora, named.lora_name


def _size_of(config: EngineConfig) -> int:
    """The most that a model takes, bytes: its files and its pools of keys and values."""
    pool = MAX_DEFAULT_BYTES if config.kv_bytes is None else config.kv_bytes
    return weight_bytes(resolve(config.model).folder) + config.data_parallel * pool
