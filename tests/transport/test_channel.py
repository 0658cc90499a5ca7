"""Messages over a pair of sockets: their order, and detection of the other side's end."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from logprobe.errors import EngineError
from logprobe.transport.channel import Channel, PeerGoneError
from logprobe.transport.codec import Codec
from logprobe.transport.messages import Abort, Event, Failure, Submit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_S = 120  # generous, also for a busy machine
commands: Codec[Any] = Codec(Submit | Abort)  # type: ignore[arg-type]
events: Codec[Any] = Codec(list[Event])  # type: ignore[misc]  # a union as an argument


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[tuple[Channel[Any], Channel[Any]]]:
    context: zmq.Context[Any] = zmq.Context()
    own, others = socket.socketpair()
    front = Channel.bind(context, tmp_path, events, own)
    engine = Channel.connect(context, tmp_path, commands, others)
    yield front, engine
    front.close()
    engine.close()
    context.term()


def test_messages_arrive_in_order_from_any_thread(sides: tuple[Channel[Any], Channel[Any]]) -> None:
    front, engine = sides
    front.wait_for_peer()

    def send(thread: int) -> None:
        for number in range(50):
            front.send(Abort(f"{thread}-{number}"))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    names = [engine.receive(LIMIT_S).request_id.split("-") for _ in range(200)]
    for thread in threads:
        thread.join()
    for own in "0123":
        assert [int(number) for thread, number in names if thread == own] == list(range(50))
    assert engine.receive(0.01) is None


def test_what_was_sent_before_an_end_is_received_before_it(
    sides: tuple[Channel[Any], Channel[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, engine = sides
    front.wait_for_peer()
    for number in range(20):
        engine.send([Failure(str(number), EngineError("x"))])
    first = front.receive(LIMIT_S)
    engine._lifeline.close()  # as when the process ends
    with monkeypatch.context() as patient:
        patient.setattr("logprobe.transport.channel.DRAIN_S", LIMIT_S)  # the thread may be late
        rest = [front.receive(LIMIT_S) for _ in range(19)]
    assert [one[0].request_id for one in (first, *rest)] == [str(number) for number in range(20)]
    with pytest.raises(PeerGoneError):
        front.receive(LIMIT_S)


def test_a_side_that_is_closed_sends_nothing(sides: tuple[Channel[Any], Channel[Any]]) -> None:
    front, _ = sides
    front.wait_for_peer()
    front.close()
    front.close()
    with pytest.raises(PeerGoneError):
        front.send(Abort("r"))


def test_a_front_never_waits_to_send(sides: tuple[Channel[Any], Channel[Any]]) -> None:
    front, engine = sides
    front.wait_for_peer()
    for _ in range(5000):  # more than socket buffers hold, and unread
        front.send(Abort("r" * 1000))
    assert engine.receive(LIMIT_S) == Abort("r" * 1000)


def test_a_peer_that_ends_before_it_comes_is_noticed(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    own, others = socket.socketpair()
    front = Channel.bind(context, tmp_path, events, own)
    others.close()
    with pytest.raises(PeerGoneError):
        front.wait_for_peer()
    with pytest.raises(PeerGoneError):
        front.send(Abort("r"))
    front.close()
    context.term()
