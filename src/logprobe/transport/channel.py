"""`Channel`: exchanges messages with another local process over two one-way ZeroMQ sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import zmq

from logprobe import runtime
from logprobe.errors import EngineError
from logprobe.transport.codec import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from logprobe.transport.codec import Codec

T = TypeVar("T")

COPIED_BYTES: Final = 1 << 16  # larger messages are sent without a copy; ZeroMQ must then track them
DRAIN_S: Final = 0.1  # seconds to wait for messages that a process sent before it ended
GONE: Final = "the process on the other side has ended"
ENDS: Final = ("to-engine", "to-front")


class PeerGoneError(EngineError):
    """The process on the other side has ended."""


class Channel(Generic[T]):
    """One side of a connection with two one-way sockets in a private folder.

    Any thread may send; only one thread may receive. `lifeline` becomes readable when the other process ends.
    """

    def __init__(
        self, sockets: tuple[Any, Any], codec: Codec[T], lifeline: socket.socket, flags: int
    ) -> None:
        self._outgoing, self._incoming = sockets
        self._codec = codec
        self._lifeline = lifeline
        self._flags = flags  # flags for sending
        self._poller = zmq.Poller()
        for own in (self._incoming, lifeline):
            self._poller.register(own, zmq.POLLIN)
        self._lock = runtime.Lock()
        self._is_closed = False  # guarded by `_lock`, which also serializes sends

    @classmethod
    def bind(cls, context: Any, folder: Path, codec: Codec[T], lifeline: socket.socket) -> Channel[T]:
        """Create the front's side, which creates the sockets in `folder`; its `send` never blocks."""
        sockets = _socket(context, zmq.PUSH), _socket(context, zmq.PULL)
        sockets[0].setsockopt(zmq.SNDHWM, 0)
        for own, name in zip(sockets, ENDS, strict=True):
            own.bind(f"ipc://{folder / name}")
        return cls(sockets, codec, lifeline, zmq.NOBLOCK)

    @classmethod
    def connect(cls, context: Any, folder: Path, codec: Codec[T], lifeline: socket.socket) -> Channel[T]:
        """Create the engine's side, which connects to the sockets in `folder`.

        Its `send` blocks while 1,000 messages are waiting to be received (ZeroMQ's default high-water mark).
        """
        sockets = _socket(context, zmq.PUSH), _socket(context, zmq.PULL)
        for own, name in zip(sockets, reversed(ENDS), strict=True):
            own.connect(f"ipc://{folder / name}")
        return cls(sockets, codec, lifeline, 0)

    def wait_for_peer(self) -> None:
        """Wait until the other side is connected.

        Raises:
            PeerGoneError: the other process ended first.
        """
        poller = zmq.Poller()
        poller.register(self._outgoing, zmq.POLLOUT)
        poller.register(self._lifeline, zmq.POLLIN)
        if self._outgoing not in dict(poller.poll()):
            raise PeerGoneError(GONE)

    def send(self, message: Any) -> None:
        """Send a message; on the engine's side this may block.

        Raises:
            ParameterError: for the reasons given in `Codec.encode`.
            PeerGoneError: this side was closed, or the other process has ended.
        """
        with self._lock:
            if self._is_closed:
                raise PeerGoneError(GONE)
            data = self._codec.encode(message)
            try:
                self._outgoing.send(data, self._flags, copy=len(data) <= COPIED_BYTES)
            except zmq.Again as error:
                raise PeerGoneError(GONE) from error

    def receive(self, timeout_s: float | None = None) -> T | None:
        """Return the next message; None if there is none within `timeout_s` seconds.

        Raises:
            PeerGoneError: the other process has ended, and all its messages were received.
        """
        ready = dict(self._poller.poll(None if timeout_s is None else round(timeout_s * 1000)))
        if self._incoming in ready or (ready and self._incoming.poll(round(DRAIN_S * 1000))):
            return self._codec.decode(self._incoming.recv(copy=False).buffer)
        if ready:
            raise PeerGoneError(GONE)
        return None

    def close(self) -> None:
        """Close the sockets; unsent messages are discarded."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._outgoing.close()
        self._incoming.close()
        self._lifeline.close()


def _socket(context: Any, kind: int) -> Any:
    own = context.socket(kind)
    own.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    own.setsockopt(zmq.LINGER, 0)
    return own
