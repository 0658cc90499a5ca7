"""The server's front on the simulated engine: HTTP requests from clients that may leave or stall."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

from logprobe.engine.backends.start import LoadedModel
from logprobe.server.app import create_app
from logprobe.server.settings import ServerSettings
from simulation.hashed import text_edge

if TYPE_CHECKING:
    from simulation.plan import Visit
    from simulation.world import World

LIMITS: Final = ServerSettings(
    max_requests=6,
    max_tokens_in_flight=120,
    max_waiting=2,
    wait_timeout_s=0.3,
    buffer_rows=3,
    stall_s=50.0,
    logprobs_mode="raw_logprobs",
)
FULL: Final = frozenset({429})
UNLUCKY: Final = frozenset({409, 429, 500, 503})  # where the engine, or its weights, are changed or harmed


class Served:
    """A server in memory, and what its clients have seen."""

    def __init__(self, world: World) -> None:
        self._world = world
        front = world.front
        model = LoadedModel(front, text_edge(), None, None)
        self.app = create_app(model, LIMITS, ("simulation.hashed:Fussy",))
        self._num_delivered = 0
        self._whole: list[tuple[Visit, Any]] = []  # whole replies
        self._num_submitted = self._num_gone = 0
        submit = front.submit

        def counted(admitted: Any) -> Any:
            self._num_submitted += len(admitted)
            return submit(admitted)

        front.submit = counted  # type: ignore[method-assign]

    async def visit(self, visit: Visit) -> None:
        """Send a request as its client does, and check the reply and the limits."""
        world = self._world
        status, data, is_gone = await self._exchange(visit, leaves=True)
        limits = self.app.state.service.limits
        for name, (_, most) in limits._max.items():
            world.require(
                0 <= limits._in_use[name] <= most + most // 8, f"{limits._in_use[name]} {name} in use"
            )
        if is_gone:
            self._num_gone += 1
            world.sometimes["client left"] += 1
            return
        is_unlucky = world.had_faults or world.is_changed or world.settings.is_poisoned
        allowed = UNLUCKY if is_unlucky else FULL
        world.sometimes["server was full"] += status == 429
        world.require(status == 200 or status in allowed, f"{visit.path}: status {status} {data[:200]!r}")
        if status != 200:
            return
        world.sometimes["reply streamed" if visit.body.get("stream") else "reply"] += 1
        if visit.body.get("stream"):
            is_ended = b"[DONE]" in data or b'"error"' in data
            world.require(is_ended, f"{visit.path}: a stream without an end: {data[-200:]!r}")
            world.require(data.count(b"[DONE]") <= 1, f"{visit.path}: a stream ends twice: {data!r}")
        else:
            self._num_delivered += len(visit.body["prompt"])
            self._whole.append((visit, json.loads(data)))

    async def _exchange(self, visit: Visit, *, leaves: bool) -> tuple[int, bytes, bool]:
        """Return the status and the body of a reply, and True if the client has left."""
        body = json.dumps(visit.body).encode()
        parts = [body[: len(body) // 2], body[len(body) // 2 :]]
        has_left = asyncio.Event()
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            if parts:
                await asyncio.sleep(visit.slow_s if leaves else 0)
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await asyncio.sleep(visit.slow_s if leaves else 0)  # as uvicorn does, before it takes the message
            if not has_left.is_set():
                sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "scheme": "http",
            "path": visit.path,
            "raw_path": visit.path.encode(),
            "query_string": b"",
            "http_version": "1.1",
            "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
            "client": (visit.caller, 1),
            "server": ("127.0.0.1", 8000),
        }
        if leaves and visit.leaves_s is not None:
            asyncio.get_running_loop().call_later(visit.leaves_s, has_left.set)
        await self.app(scope, receive, send)
        if has_left.is_set():
            return 0, b"", True
        starts = [message for message in sent if message["type"] == "http.response.start"]
        ends = [message for message in sent[1:] if not message.get("more_body")]
        self._world.require(len(starts) == 1, f"{visit.path}: {len(starts)} replies")
        self._world.require(
            len(ends) == 1 and ends[0] is sent[-1], f"{visit.path}: a reply has {len(ends)} ends"
        )
        return starts[0]["status"], b"".join(message["body"] for message in sent[1:]), False

    async def check_rest(self) -> None:
        """Check that all tickets were returned, that each request was counted once, and the replies."""
        service, require = self.app.state.service, self._world.require
        left = {
            "in use": {name: count for name, count in service.limits._in_use.items() if count},
            "callers": service.limits._by_caller,
            "queues": service.limits._queues,
            "bodies": service.workers._in_progress._by_caller,
        }
        require(not any(left.values()), f"the server keeps {left}")
        ended = [sample for metric in service.metrics.requests.collect() for sample in metric.samples]
        num_counted = sum(sample.value for sample in ended if sample.name.endswith("_total"))
        # A client that leaves before its request reaches the engine is counted, too.
        is_right = self._num_delivered <= num_counted <= self._num_submitted + self._num_gone
        require(
            is_right, f"{num_counted} of {self._num_submitted} requests counted, {self._num_delivered} seen"
        )
        if self._world.is_changed:
            return
        for visit, reply in self._whole:
            status, data, _ = await self._exchange(visit, leaves=False)
            again = json.loads(data)
            is_same = reply["choices"] == again.get("choices")
            require(is_same, f"{visit.path}: another reply than alone, {status}")
