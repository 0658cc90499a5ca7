"""A streamed reply has one end, whatever happens while a slow client takes the last part."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.server.http import replies
from logprobe.server.http.errors import ApiError
from logprobe.server.http.replies import DONE, StreamedReply

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


@pytest.mark.parametrize("is_late", [False, True])  # True: only the end waits, and the body is complete
def test_a_check_that_fails_while_a_client_is_slow_ends_the_body_once(
    monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    monkeypatch.setattr(replies, "CHECK_EVERY_S", 0.01)
    has_failed, sent = asyncio.Event(), []

    async def parts() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"
        yield DONE

    def check() -> None:
        if has_failed.is_set():
            raise ApiError(503, "the engine has stopped")

    async def send(message: dict[str, Any]) -> None:
        is_slow = message.get("body") == (b"" if is_late else DONE)
        if is_slow and not has_failed.is_set():
            has_failed.set()
            await asyncio.sleep(10)  # cancelled: the message is not taken
        sent.append(message)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    reply = StreamedReply(parts(), {}, check=check, failed=lambda _: b"data: failed\n\n" + DONE)
    asyncio.run(reply({"type": "http"}, receive, send))
    body = b"".join(message.get("body", b"") for message in sent)
    assert body == b"data: 1\n\n" + (DONE if is_late else b"data: failed\n\n" + DONE)
    assert [message.get("more_body") for message in sent[1:]].count(False) == 1
