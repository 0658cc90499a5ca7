"""Session with a server: find out which forms of requests it answers, and send requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from logprobe.analysis.auditing.endpoint import Refusal
from logprobe.analysis.auditing.forms import FORMS, PROMPT_FORMS, Ask, Reply, read
from logprobe.analysis.auditing.report import MAX_TEXT
from logprobe.errors import ServerError, UnreachableError
from logprobe.transport.http_client import printable

if TYPE_CHECKING:
    from logprobe.analysis.auditing.endpoint import Connection

Extras: TypeAlias = Mapping[str, Any]
Progress: TypeAlias = Callable[[int, str], None]
TRIAL_TEXT: Final = "The sky above the port was"
EXTRA_IDS: Final = 2048  # ids that a reply may have beyond the request, such as the chat template's tokens
WITHOUT_ROWS: Final = "200, and no row of log-probabilities"
_TOKEN_STRINGS: Final = {"return_tokens_as_token_ids": True}
ID_EXTRAS: Final[tuple[Extras, ...]] = ({"return_token_ids": True} | _TOKEN_STRINGS, _TOKEN_STRINGS, {})
"""Fields that make a server return the id of every token, if it supports them; tried in turn."""


@dataclass(slots=True)
class Session:
    """Sends requests to a server, and records which forms of requests (`FORMS`) the server answers."""

    connection: Connection
    num_ids: int  # vocabulary size of the model that computes the exact rows
    model: str | None = None  # name of the model on the server; `meet` sets the first one that is listed
    progress: Progress | None = None
    tried: tuple[Extras, ...] = ID_EXTRAS
    owner: str | None = None  # `owned_by` of the server's model, usually the server's name
    extras: dict[str, Extras] = field(default_factory=dict)  # per answered form: extra fields to send
    absent: dict[str, str] = field(default_factory=dict)  # per other form: the server's message
    min_tokens: dict[str, int] = field(default_factory=dict)  # per form: fewest tokens to generate
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
            ServerError: there is no reply, or the reply cannot be read or has token ids that our model lacks.
            ParameterError: the server rejects the key.
        """
        ask = replace(ask, max_tokens=max(ask.max_tokens, self.min_tokens.get(ask.form, 0)))
        reply = await self._send(ask, self.extras.get(ask.form, {}))
        self.done += 1
        if isinstance(reply, Reply):
            self._check_ids(reply, ask)
        return reply

    async def _send(self, ask: Ask, extras: Extras) -> Reply | Refusal:
        path = FORMS[ask.form]
        body = ask.body(extras) | ({} if self.model is None else {"model": self.model})
        return read(await self.connection.send(path, body), ask, f"POST {self.connection.url}{path}")

    def _check_ids(self, reply: Reply, ask: Ask) -> None:
        """Reject a reply with ids that our model does not have, or with far more ids than possible.

        Our model computes a row for each id.
        """
        expected = len(str(ask.prompt) if ask.ids is None else ask.ids)
        for ids, limit in ((reply.prompt_ids, expected), (reply.completion_ids, ask.max_tokens)):
            if ids is not None and len(ids) > limit + EXTRA_IDS:
                raise ServerError(
                    f"{self.connection.url}: {len(ids)} token ids where at most {limit} were expected; "
                    "does the server implement OpenAI's API?"
                )
            if ids and max(ids) >= self.num_ids:
                raise ServerError(
                    f"{self.connection.url}: the reply has token id {max(ids)}, but the model that computes "
                    f"the exact rows has only {self.num_ids} tokens; load the model that the server runs"
                )

    async def settle(self) -> None:
        """Score a short prompt, so that the next request is not the first after a generation."""
        if self.prompt_form is not None:
            await self.ask(Ask(form=self.prompt_form, prompt=TRIAL_TEXT, num_top=1))

    def tell(self, what: str) -> None:
        """Report progress."""
        if self.progress is not None:
            self.progress(self.done, what)

    async def meet(self) -> None:
        """Fetch the name of the model, and try each form of request with a short prompt.

        Raises:
            ServerError: the server answers neither completions nor chats.
            UnreachableError, ParameterError: raised by `Connection.send`.
        """
        await self._identify()
        for form in FORMS:
            await self._try(form)
        if not self.extras and WITHOUT_ROWS not in {self.absent["completions"], self.absent["chat"]}:
            raise ServerError(
                f"{self.connection.url}: answers neither completions nor chats "
                f"({self.absent['completions']}); does the server implement OpenAI's API?"
            )

    async def _identify(self) -> None:
        listed = await self.connection.send("/v1/models")
        data = listed.get("data") if isinstance(listed, dict) else None
        first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
        self.owner = printable(str(first.get("owned_by") or ""), MAX_TEXT) or None
        if self.model is None and isinstance(first.get("id"), str):
            self.model = first["id"]

    async def _try(self, form: str) -> None:
        """Try one form of request with each set of fields that request token ids."""
        best: Reply | Refusal | None = None
        for max_tokens in (0, 1) if form in PROMPT_FORMS else (2,):
            for extras in self.tried:
                ask = Ask(form=form, prompt=TRIAL_TEXT, max_tokens=max_tokens, num_top=2).as_chat()
                reply = await self._answer(ask, extras)
                # Prefer a reply without rows to a refusal, and the last refusal to earlier ones, because the
                # last request is the simplest.
                if isinstance(reply, Reply) or not isinstance(best, Reply):
                    best = reply
                if isinstance(reply, Reply) and _has_rows(reply, wants_prompt=ask.wants_prompt):
                    self.extras[form] = extras
                    self.min_tokens[form] = max_tokens if form in PROMPT_FORMS else 0
                    return
        self.absent[form] = str(best) if isinstance(best, Refusal) else WITHOUT_ROWS

    async def _answer(self, ask: Ask, extras: Extras) -> Reply | Refusal:
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
