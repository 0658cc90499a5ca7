"""One audit's conversation with a server: the forms that it answers, and requests in them.

Before it: an endpoint. After it: replies, each to one ask at a time unless others are wanted beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from logprobe.analysis.auditing.dialects import (
    CHAT_FORMS,
    COMPLETION_FORMS,
    FORMS,
    PROMPT_FORMS,
    Ask,
    Refusal,
    Reply,
    exchange,
)
from logprobe.errors import ServerError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from logprobe.analysis.auditing.endpoint import Connection

TRIAL_TEXT: Final = "The sky above the port was"
TRIAL_CHAT: Final = ({"role": "user", "content": "Name a colour."},)
EXTRAS: Final[dict[str, dict[str, Any]]] = {
    "completions": {"return_token_ids": True},
    "echo": {"return_token_ids": True},
    "prompt_logprobs": {"return_token_ids": True},
    "chat": {"return_token_ids": True},
    "chat prompt_logprobs": {"return_token_ids": True},
}
"""Fields that have a server tell ids, where it takes them."""


def _has_rows(reply: Reply, *, wants_prompt: bool) -> bool:
    """Whether a trial has rows of what was asked; a server without echo may give its own token's."""
    return len(reply.prompt or ()) > 2 if wants_prompt else bool(reply.completion)


@dataclass(slots=True)
class Session:
    """What is known of a server."""

    connection: Connection
    num_ids: int  # of the model that computes the exact rows
    model: str | None = None
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)  # form → fields that it takes
    refused: dict[str, str] = field(default_factory=dict)  # form → why the server has it not
    without_rows: dict[str, str] = field(default_factory=dict)  # form → 200, and no row
    least: dict[str, int] = field(default_factory=dict)  # form → fewest tokens to generate
    takes_ids: bool = True
    progress: Callable[[int, int, str], None] | None = None
    done: int = 0
    planned: int = 0

    @property
    def prompt_form(self) -> str | None:
        """The form whose prompt rows are asked again and again."""
        return next((name for name in PROMPT_FORMS if name in self.extras), None)

    @property
    def completion_form(self) -> str | None:
        """The same of generated rows."""
        return next((name for name in COMPLETION_FORMS if name in self.extras), None)

    @property
    def stream_forms(self) -> list[str]:
        """Forms that a stream can be asked of."""
        return [name for name in ("completions", "chat") if name in self.extras]

    async def ask(self, ask: Ask) -> Reply | Refusal:
        """The reply to one ask.

        Raises:
            ServerError, ParameterError: as `exchange`; ServerError for ids that our model does not have, too.
        """
        least = self.least.get(ask.form, 0)
        if ask.max_tokens < least:
            ask = replace(ask, max_tokens=least)
        extras = {} if ask.is_plain else self.extras.get(ask.form, {})
        reply = await exchange(self.connection, ask, extras, self.model)
        self.done += 1
        if isinstance(reply, Reply):
            highest = max((*(reply.prompt_ids or ()), *(reply.completion_ids or ())), default=0)
            if highest >= self.num_ids:
                raise ServerError(
                    f"{self.connection.url}: its token {highest} is none of the {self.num_ids} of the model "
                    "that computes the exact rows; name the model that the server runs"
                )
        return reply

    async def settle(self) -> None:
        """Score one short prompt, so that what follows is not the first after a generation."""
        if self.prompt_form is not None:
            await self.ask(Ask(form=self.prompt_form, prompt=TRIAL_TEXT, num_top=1))

    def tell(self, what: str) -> None:
        """Say how far the audit is."""
        if self.progress is not None:
            self.progress(self.done, max(self.planned, self.done), what)

    # -- meeting the server --------------------------------------------------------------------------------

    async def meet(self) -> None:
        """Try each form once with few tokens.

        Raises:
            ServerError: none of them is answered; the message has the server's words for the first.
            UnreachableError, ParameterError: as `Connection.post`.
        """
        for form in FORMS:
            await self._try(form)
        if not self.extras and not self.without_rows.keys() & {"completions", "chat"}:
            words = self.refused.get("completions", "no form is answered")
            raise ServerError(
                f"{self.connection.url}: answers no completion and no chat ({words}); "
                "is it a server with OpenAI's interface?"
            )
        if self.completion_form in ("completions", "generate", "completion"):
            assert self.completion_form is not None
            ids = Ask(form=self.completion_form, prompt=(1, 2, 3), max_tokens=1, num_top=1)
            self.takes_ids = isinstance(await self._answer(ids), Reply)

    async def _try(self, form: str) -> None:
        """One form, with the fields that have it tell ids and without them."""
        wants_prompt = form in PROMPT_FORMS or form == "chat prompt_logprobs"
        prompt: Any = TRIAL_CHAT if form in CHAT_FORMS else TRIAL_TEXT
        heard: Reply | Refusal | None = None
        for num_tokens in (0, 1) if form in PROMPT_FORMS else (2,):
            for extras in dict.fromkeys([*EXTRAS.get(form, {}), ""]):
                given = {extras: EXTRAS[form][extras]} if extras else {}
                ask = Ask(form=form, prompt=prompt, max_tokens=num_tokens, num_top=2)
                reply = await self._answer(ask, given)
                # A reply without rows says more of a form than a refusal, and of refusals the barest ask's.
                if isinstance(reply, Reply) or not isinstance(heard, Reply):
                    heard = reply
                if isinstance(reply, Reply) and _has_rows(reply, wants_prompt=wants_prompt):
                    self.extras[form], self.least[form] = given, num_tokens if form in PROMPT_FORMS else 0
                    return
        if isinstance(heard, Refusal):
            self.refused[form] = str(heard)
        else:
            self.without_rows[form] = "200, and no row of log-probabilities"

    async def _answer(self, ask: Ask, extras: Mapping[str, Any] | None = None) -> Reply | Refusal:
        """A reply, where one that cannot be read counts as refused: other servers have other routes there."""
        try:
            return await exchange(self.connection, ask, extras or {}, self.model)
        except UnreachableError:
            raise
        except ServerError as error:
            if isinstance(error.__cause__, TimeoutError):  # a slow server, which would be slow in each form
                raise
            return Refusal(200, str(error))
