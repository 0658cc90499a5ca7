"""Session of an audit with a server: find out which forms of requests it answers, and send requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from logprobe.analysis.auditing.endpoint import Refusal
from logprobe.analysis.auditing.forms import FORMS, PROMPT_FORMS, Ask, Reply, read
from logprobe.errors import ServerError, UnreachableError

if TYPE_CHECKING:
    from logprobe.analysis.auditing.endpoint import Connection

Progress: TypeAlias = Callable[[int, int, str], None]
TRIAL_TEXT: Final = "The sky above the port was"
EXTRAS: Final[tuple[dict[str, Any], ...]] = ({"return_token_ids": True}, {})
"""Fields that make a server return token ids, if it supports them; each set is tried in turn."""
EXTRA_IDS: Final = 2048  # ids that a reply may have beyond the request, such as the chat template's tokens
WITHOUT_ROWS: Final = "200, and no row of log-probabilities"


@dataclass(slots=True)
class Session:
    """Sends requests to a server, and records which forms of requests (`FORMS`) the server answers."""

    connection: Connection
    num_ids: int  # vocabulary size of the model that computes the exact rows
    model: str | None = None
    progress: Progress | None = None
    planned: int = 0  # number of requests planned, for `progress`
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)  # per answered form: extra fields to send
    refused: dict[str, str] = field(default_factory=dict)  # per refused form: the server's message
    without_rows: list[str] = field(default_factory=list)  # forms answered with 200, but without rows
    min_tokens: dict[str, int] = field(default_factory=dict)  # per form: fewest tokens to generate
    takes_ids: bool = True  # the server accepts prompts as token ids
    done: int = 0

    @property
    def prompt_form(self) -> str | None:
        """The form for repeated requests for prompt rows; None if the server returns no prompt rows."""
        return next((form for form in PROMPT_FORMS if form in self.extras), None)

    @property
    def completion_form(self) -> str | None:
        """The form for repeated requests for rows of generated tokens; None without completions."""
        return "completions" if "completions" in self.extras else None

    async def ask(self, ask: Ask) -> Reply | Refusal:
        """Send a request and return the reply.

        Raises:
            ServerError: there is no reply, or it cannot be read or has ids that our model does not have.
            ParameterError: the server rejects the key.
        """
        ask = replace(ask, max_tokens=max(ask.max_tokens, self.min_tokens.get(ask.form, 0)))
        reply = await self._send(ask, {} if ask.is_plain else self.extras.get(ask.form, {}))
        self.done += 1
        if isinstance(reply, Reply):
            self._check_ids(reply, ask)
        return reply

    async def _send(self, ask: Ask, extras: Mapping[str, Any]) -> Reply | Refusal:
        path = FORMS[ask.form]
        body = ask.body(extras) | ({} if self.model is None else {"model": self.model})
        return read(await self.connection.send(path, body), ask, f"POST {self.connection.url}{path}")

    def _check_ids(self, reply: Reply, ask: Ask) -> None:
        """Reject a reply with ids that our model does not have, or with far more ids than possible.

        Each id costs a row of our model.
        """
        expected = len(str(ask.prompt) if ask.ids is None else ask.ids)
        for ids, limit in ((reply.prompt_ids, expected), (reply.completion_ids, ask.max_tokens)):
            if ids is not None and len(ids) > limit + EXTRA_IDS:
                raise ServerError(
                    f"{self.connection.url}: {len(ids)} token ids where at most {limit} were expected; "
                    "is it a server with OpenAI's interface?"
                )
            if ids and max(ids) >= self.num_ids:
                raise ServerError(
                    f"{self.connection.url}: token {max(ids)} is not one of the {self.num_ids} of the model "
                    "that computes the exact rows; name the model that the server runs"
                )

    async def settle(self) -> None:
        """Score a short prompt, so that the next request is not the first after a generation."""
        if self.prompt_form is not None:
            await self.ask(Ask(form=self.prompt_form, prompt=TRIAL_TEXT, num_top=1))

    def tell(self, what: str) -> None:
        """Report progress."""
        if self.progress is not None:
            self.progress(self.done, max(self.planned, self.done), what)

    async def meet(self) -> None:
        """Try each form of request with a short prompt.

        Raises:
            ServerError: the server answers neither completions nor chats.
            UnreachableError, ParameterError: `Connection.send` raised this error.
        """
        for form in FORMS:
            await self._try(form)
        if not self.extras and not {*self.without_rows} & {"completions", "chat"}:
            message = self.refused.get("completions", "no form is answered")
            raise ServerError(
                f"{self.connection.url}: answers no completion and no chat ({message}); "
                "is it a server with OpenAI's interface?"
            )
        if self.completion_form is not None:
            ids = Ask(form=self.completion_form, prompt=(1, 2, 3), max_tokens=1, num_top=1)
            self.takes_ids = isinstance(await self._answer(ids, {}), Reply)

    async def _try(self, form: str) -> None:
        """Try one form of request, with and without the fields that request token ids."""
        best: Reply | Refusal | None = None
        for max_tokens in (0, 1) if form in PROMPT_FORMS else (2,):
            for extras in EXTRAS:
                ask = Ask(form=form, prompt=TRIAL_TEXT, max_tokens=max_tokens, num_top=2).as_chat()
                reply = await self._answer(ask, extras)
                # Prefer a reply without rows to a refusal, and the last refusal, because the last request is
                # the simplest one, to earlier refusals.
                if isinstance(reply, Reply) or not isinstance(best, Reply):
                    best = reply
                if isinstance(reply, Reply) and _has_rows(reply, wants_prompt=ask.wants_prompt):
                    self.extras[form] = extras
                    self.min_tokens[form] = max_tokens if form in PROMPT_FORMS else 0
                    return
        if isinstance(best, Refusal):
            self.refused[form] = str(best)
        else:
            self.without_rows.append(form)

    async def _answer(self, ask: Ask, extras: Mapping[str, Any]) -> Reply | Refusal:
        """Send a request; treat an unreadable reply as a refusal, because servers' routes differ."""
        try:
            return await self._send(ask, extras)
        except UnreachableError:
            raise
        except ServerError as error:
            if isinstance(error.__cause__, TimeoutError):  # a slow server would be slow for every form
                raise
            return Refusal(200, str(error))


def _has_rows(reply: Reply, *, wants_prompt: bool) -> bool:
    """Return True if the reply has rows of the prompt or completion.

    A server that ignores `echo` returns rows only for the generated token, which do not count as prompt rows.
    """
    return len(reply.prompt or ()) > 2 if wants_prompt else bool(reply.completion)
