"""Responses kept for later, each with the conversation that it ends."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
from cachetools import FIFOCache

from logprobe.errors import shortened
from logprobe.server.http.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

Messages: TypeAlias = list[dict[str, Any]]


class StoredResponse(NamedTuple):
    """A response and the messages up to its answer, both as JSON: what is held is what is counted."""

    response: bytes
    conversation: bytes

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return len(self.response) + len(self.conversation)

    def messages(self) -> Messages:
        """The conversation, the answer last."""
        return msgspec.json.decode(self.conversation, type=Messages)


class StoredResponses:
    """The latest responses by their owner and id; the oldest go first.

    An owner is a digest of the key that a request brought. Any thread may use it: large replies are written
    by workers.
    """

    def __init__(self, max_responses: int, max_bytes: int, max_conversation_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_conversation_bytes = max_conversation_bytes  # which is read in one go
        self._kept: FIFOCache[tuple[bytes, str], StoredResponse]
        self._kept = FIFOCache(max_bytes, getsizeof=lambda stored: stored.num_bytes)
        self._lock = threading.Lock()

    def keep(self, owner: bytes, response: dict[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Keep one, unless it alone is beyond the bounds, or its conversation longer than a body may be."""
        stored = StoredResponse(msgspec.json.encode(response), msgspec.json.encode(messages))
        is_long = len(stored.conversation) > self._max_conversation_bytes
        if not self._max_responses or is_long or stored.num_bytes > self._kept.maxsize:
            return
        with self._lock:
            while len(self._kept) >= self._max_responses:
                self._kept.popitem()
            self._kept[owner, response["id"]] = stored

    def find(self, owner: bytes, response_id: str, param: str | None = None) -> StoredResponse:
        """Get one.

        Raises:
            ApiError: 404 where it is not, or no longer, stored, or is another owner's.
        """
        with self._lock:
            stored = self._kept.get((owner, response_id))
        if stored is None:
            message = f"response {shortened(response_id)!r} is not stored here"
            raise ApiError(404, message, param=param, code="response_not_found")
        return stored

    def drop(self, owner: bytes, response_id: str) -> None:
        """Forget one; raises as `find` does."""
        self.find(owner, response_id)
        with self._lock:
            self._kept.pop((owner, response_id), None)
