"""Responses kept for later requests, in memory, a bounded number of them.

Before it: finished responses. After it: `GET /v1/responses/{id}` and `previous_response_id`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeAlias

from logprobe.server.errors import ApiError

Messages: TypeAlias = list[dict[str, Any]]


class StoredResponses:
    """The latest responses by id, with the conversation that each ends; the oldest go first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[str, tuple[dict[str, Any], Messages]] = OrderedDict()

    def keep(self, response: dict[str, Any], messages: Messages) -> None:
        """Keep one."""
        self._kept[response["id"]] = (response, messages)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def find(self, response_id: str, param: str | None = None) -> tuple[dict[str, Any], Messages]:
        """Get one.

        Raises:
            ApiError: 404 where it is not, or no longer, stored.
        """
        if response_id not in self._kept:
            message = f"response {response_id!r} is not stored here"
            raise ApiError(404, message, param=param, code="response_not_found")
        return self._kept[response_id]

    def drop(self, response_id: str) -> None:
        """Forget one."""
        self.find(response_id)
        del self._kept[response_id]
