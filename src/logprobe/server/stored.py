"""In-memory store of responses (`/v1/responses`) and their conversations."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from logprobe import runtime
from logprobe.errors import shortened
from logprobe.server.http.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

Messages: TypeAlias = list[dict[str, Any]]


class StoredResponse(NamedTuple):
    """A response, and the messages up to and including its answer, both as JSON bytes."""

    response: bytes
    conversation: bytes

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return len(self.response) + len(self.conversation)

    def messages(self) -> Messages:
        """Decode the conversation; the last message is the answer."""
        return msgspec.json.decode(self.conversation, type=Messages)


class StoredResponses:
    """Keeps the latest responses by owner and id; thread-safe, because worker threads write large replies.

    An owner is identified by a digest of the request's API key. When the store is full, it evicts the oldest
    response of the owner who uses the largest share of the store.
    """

    def __init__(self, max_responses: int, max_bytes: int, max_conversation_bytes: int) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._max_conversation_bytes = max_conversation_bytes  # a conversation is decoded in one call
        self._kept: dict[tuple[bytes, str], StoredResponse] = {}  # oldest first
        self._counts, self._bytes = Counter[bytes](), Counter[bytes]()  # by owner
        self._lock = runtime.Lock()

    def keep(self, owner: bytes, response: dict[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Store a response, unless the response or its conversation exceeds the limits of the store."""
        stored = StoredResponse(msgspec.json.encode(response), msgspec.json.encode(messages))
        is_long = len(stored.conversation) > self._max_conversation_bytes
        if not self._max_responses or is_long or stored.num_bytes > self._max_bytes:
            return
        with self._lock:
            most_bytes = self._max_bytes - stored.num_bytes
            while len(self._kept) >= self._max_responses or self._bytes.total() > most_bytes:
                largest = max(self._counts, key=self._share)
                self._pop(next(key for key in self._kept if key[0] == largest))
            self._kept[owner, response["id"]] = stored
            self._counts[owner] += 1
            self._bytes[owner] += stored.num_bytes

    def find(self, owner: bytes, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a stored response.

        Raises:
            ApiError: 404 if the response is not stored, was evicted, or belongs to another owner.
        """
        with self._lock:
            stored = self._kept.get((owner, response_id))
        if stored is None:
            raise _not_stored(response_id, param)
        return stored

    def drop(self, owner: bytes, response_id: str) -> None:
        """Delete a stored response.

        Raises:
            ApiError: 404 if the response is not stored, was evicted, or belongs to another owner.
        """
        with self._lock:
            is_stored = (owner, response_id) in self._kept
            if is_stored:
                self._pop((owner, response_id))
        if not is_stored:
            raise _not_stored(response_id)

    def _share(self, owner: bytes) -> float:
        """Return the fraction of the store that an owner uses, by number or by size, whichever is larger."""
        return max(self._counts[owner] / self._max_responses, self._bytes[owner] / self._max_bytes)

    def _pop(self, key: tuple[bytes, str]) -> None:
        owner = key[0]
        self._bytes[owner] -= self._kept.pop(key).num_bytes
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._counts[owner], self._bytes[owner]


def _not_stored(response_id: str, param: str | None = None) -> ApiError:
    message = f"response {shortened(response_id)!r} is not stored"
    return ApiError(404, message, param=param, code="response_not_found")
