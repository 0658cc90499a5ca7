"""Session of an audit with a server: find the request forms that it supports, and send requests."""

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
"""Fields that have a server return ids, where it takes them."""
EXTRA_IDS: Final = 2048  # of a reply beyond its request: a chat template has tokens of its own
WITHOUT_ROWS: Final = "200, and no row of log-probabilities"


@dataclass(slots=True)
class Session:
    """Forms of a server, and requests to it."""

    connection: Connection
    num_ids: int  # of the model that computes the exact rows
    model: str | None = None
    progress: Progress | None = None
    planned: int = 0  # requests, for `progress`
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)  # answered form → fields it takes
    refused: dict[str, str] = field(default_factory=dict)  # form → why the server lacks it
    without_rows: list[str] = field(default_factory=list)  # forms answered with 200 and no row
    min_tokens: dict[str, int] = field(default_factory=dict)  # form → fewest tokens to generate
    takes_ids: bool = True
    done: int = 0

    @property
    def prompt_form(self) -> str | None:
        """The form whose prompt rows are requested repeatedly."""
        return next((form for form in PROMPT_FORMS if form in self.extras), None)

    @property
    def completion_form(self) -> str | None:
        """The form whose generated rows are requested repeatedly."""
        return "completions" if "completions" in self.extras else None

    async def ask(self, ask: Ask) -> Reply | Refusal:
        """Return the reply to one ask.

        Raises:
            ServerError: no reply, or one that cannot be read, or with ids that our model does not have.
            ParameterError: the server refuses the key.
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
        """Refuse ids of another model, and far more than a request can have: each takes a row of ours."""
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
        """Try each form once with few tokens.

        Raises:
            ServerError: the server answers neither completions nor chats.
            UnreachableError, ParameterError: as `Connection.post`.
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
        """Try one form, with and without the fields that request token ids."""
        best: Reply | Refusal | None = None
        for max_tokens in (0, 1) if form in PROMPT_FORMS else (2,):
            for extras in EXTRAS:
                ask = Ask(form=form, prompt=TRIAL_TEXT, max_tokens=max_tokens, num_top=2).as_chat()
                reply = await self._answer(ask, extras)
                # Prefer a reply without rows to a refusal, and the refusal of the last, simplest request.
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
        """Return a reply; treat one that cannot be parsed as a refusal, as servers' routes differ."""
        try:
            return await self._send(ask, extras)
        except UnreachableError:
            raise
        except ServerError as error:
            if isinstance(error.__cause__, TimeoutError):  # the server is slow, and would be for every form
                raise
            return Refusal(200, str(error))


def _has_rows(reply: Reply, *, wants_prompt: bool) -> bool:
    """Return whether rows of the right kind came; without echo, only the generated token has one."""
    return len(reply.prompt or ()) > 2 if wants_prompt else bool(reply.completion)
