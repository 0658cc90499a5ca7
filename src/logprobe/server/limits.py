"""How much may be in progress at once: completions, tokens, and bytes of log-probabilities.

Before it: a checked request. After it: the engine. Full means 429 at once; nothing waits here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logprobe.server.http.errors import ApiError, bad_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.engine.request import Request
    from logprobe.server.settings import ServerSettings

BYTES_PER_ENTRY: Final = 8  # id and value as a record holds them
RETRY_AFTER_S: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What requests may come to."""

    requests: int
    tokens: int
    logprob_bytes: int

    @classmethod
    def of(cls, requests: Sequence[Request], vocab_size: int) -> Cost:
        """The most that these requests can take."""
        samples = sum(request.params.num_samples for request in requests)
        tokens = sum(
            len(request.prompt_token_ids) + request.params.num_samples * request.params.max_tokens
            for request in requests
        )
        return cls(
            requests=samples,
            tokens=tokens,
            logprob_bytes=sum(_logprob_bytes(request, vocab_size) for request in requests),
        )


class Ticket:
    """Leave to run, given back once."""

    def __init__(self, limits: Limits, cost: Cost) -> None:
        self._limits = limits
        self._cost: Cost | None = cost

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        if self._cost is not None:
            self._limits.subtract(self._cost)
            self._cost = None


class Limits:
    """Counts what is in progress; used from the event loop alone."""

    def __init__(self, settings: ServerSettings) -> None:
        self._most = {
            "requests": settings.max_requests,
            "tokens": settings.max_tokens_in_flight,
            "logprob_bytes": settings.max_logprob_bytes,
        }
        self._now = dict.fromkeys(self._most, 0)

    def admit(self, cost: Cost) -> Ticket:
        """Take the cost in.

        Raises:
            ApiError: 400 where it alone is beyond a limit, 429 where there is no room now.
        """
        for name, most in self._most.items():
            asked = getattr(cost, name)
            if asked > most:
                raise bad_request(None, f"asks for up to {asked} {name}; at most {most} are let through")
        for name, most in self._most.items():
            if self._now[name] + getattr(cost, name) > most:
                raise ApiError(
                    429,
                    f"the server is full ({name}: {self._now[name]} of {most} in use); try again",
                    code="server_full",
                    headers={"Retry-After": str(RETRY_AFTER_S)},
                )
        for name in self._most:
            self._now[name] += getattr(cost, name)
        return Ticket(self, cost)

    def subtract(self, cost: Cost) -> None:
        """Give back what was taken in."""
        for name in self._most:
            self._now[name] -= getattr(cost, name)

    def in_use(self) -> dict[str, int]:
        """What is taken now."""
        return dict(self._now)


def _logprob_bytes(request: Request, vocab_size: int) -> int:
    params = request.params
    given = len(params.logprob_token_ids or ())

    def width(k: int | None) -> int:
        return 0 if k is None else (vocab_size if k == -1 else min(k, vocab_size)) + 1 + given

    stages = 2 if params.logprobs_mode == "both" else 1
    rows = params.num_samples * params.max_tokens * width(params.logprobs) * stages
    rows += len(request.prompt_token_ids) * width(params.prompt_logprobs)
    return rows * BYTES_PER_ENTRY + (vocab_size * 4 if request.wants_row else 0)
