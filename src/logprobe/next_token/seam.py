"""What asks for rows need of an engine and of its words; any `EngineBackend` with a `TextEdge` has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.engine.backend import Capabilities
    from logprobe.engine.request import Request, RequestOutput
    from logprobe.models import Vocabulary


class RowEngine(Protocol):
    """The part of `EngineBackend` that rows and samples need; a request ends in one output or one error."""

    def check(self, request: Request) -> None:
        """Raise `ParameterError` where a request can never be served, saying why."""

    def submit(self, request: Request) -> None:
        """Check and accept a request; `result` must follow it."""

    def submit_many(self, requests: Sequence[Request]) -> None:
        """Accept requests that run together where they fit, or none where one is refused."""

    @property
    def is_busy(self) -> bool:
        """Whether a new request would join what runs without delay."""

    def list_loras(self) -> dict[str, str]:
        """The loaded adapters: name → path."""

    async def result(self, request_id: str) -> RequestOutput:
        """The request's output once it has ended."""

    def abort(self, request_id: str) -> None:
        """Give a request up; it ends with finish reason `abort`."""

    def capabilities(self) -> Capabilities:
        """What this engine can do."""

    def close(self) -> None:
        """End all requests and let the model go; a second call does nothing."""


class Words(Protocol):
    """What a model's ids stand for."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, as transformers has it."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The exact bytes of every id."""

    @property
    def bos_token_id(self) -> int | None:
        """What stands before a text; None where the model has no such token."""


class RowModel(Protocol):
    """An engine with its words."""

    @property
    def engine(self) -> RowEngine:
        """What computes."""

    @property
    def text(self) -> Words:
        """What its ids stand for."""
