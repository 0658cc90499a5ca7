"""Session of an audit with a server: find the request forms that it supports, and send requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from logprobe.analysis.auditing.forms import FORMS, PROMPT_FORMS, Ask, Refusal, Reply, exchange
from logprobe.errors import ServerError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from logprobe.analysis.auditing.endpoint import Connection

TRIAL_TEXT: Final = "The sky above the port was"
TRIAL_CHAT: Final = ({"role": "user", "content": "Name a colour."},)
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
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)  # answered form → fields it takes
    refused: dict[str, str] = field(default_factory=dict)  # form → why the server lacks it
    without_rows: list[str] = field(default_factory=list)  # forms answered with 200 and no row
    min_tokens: dict[str, int] = field(default_factory=dict)  # form → fewest tokens to generate
    takes_ids: bool = True
    progress: Callable[[int, int, str], None] | None = None
    done: int = 0
    planned: int = 0

    @property
    def prompt_form(self) -> str | None:
        """The form whose prompt rows are requested repeatedly."""
        return next((form for form in PROMPT_FORMS if form in self.extras), None)

    @property
    def completion_form(self) -> str | None:
        """The form whose generated rows are requested repeatedly."""
        return "completions" if "completions" in self.extras else None

    @property
    def stream_forms(self) -> list[str]:
        """Forms that can be streamed."""
        return [form for form in ("completions", "chat") if form in self.extras]

    async def ask(self, ask: Ask) -> Reply | Refusal:
        """Return the reply to one ask.

        Raises:
            ServerError: as `exchange`, or a reply with too many ids, or ids that our model does not have.
            ParameterError: the server refuses the key.
        """
        ask = replace(ask, max_tokens=max(ask.max_tokens, self.min_tokens.get(ask.form, 0)))
        extras = {} if ask.is_plain else self.extras.get(ask.form, {})
        reply = await exchange(self.connection, ask, extras, self.model)
        self.done += 1
        if isinstance(reply, Reply):
            self._check_lengths(reply, ask)
            highest = max((*(reply.prompt_ids or ()), *(reply.completion_ids or ())), default=0)
            if highest >= self.num_ids:
                raise ServerError(
                    f"{self.connection.url}: token {highest} is not one of the {self.num_ids} of the model "
                    "that computes the exact rows; name the model that the server runs"
                )
        return reply

    def _check_lengths(self, reply: Reply, ask: Ask) -> None:
        """Refuse far more token ids than the request can have: each takes a row of the vocabulary."""
        prompt = str(ask.prompt) if ask.ids is None else ask.ids
        for name, ids, expected in (
            ("prompt", reply.prompt_ids, len(prompt)),
            ("completion", reply.completion_ids, ask.max_tokens),
        ):
            if ids is not None and len(ids) > expected + EXTRA_IDS:
                raise ServerError(
                    f"{self.connection.url}: {len(ids)} {name} token ids for a request of at most "
                    f"{expected}; is it a server with OpenAI's interface?"
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
        is_prompt = form in PROMPT_FORMS
        best: Reply | Refusal | None = None
        for max_tokens in (0, 1) if is_prompt else (2,):
            for extras in EXTRAS:
                ask = Ask(form=form, prompt=TRIAL_TEXT, max_tokens=max_tokens, num_top=2)
                ask = replace(ask, prompt=TRIAL_CHAT) if ask.is_chat else ask
                reply = await self._answer(ask, extras)
                # Prefer a reply without rows to a refusal, and the refusal of the last, simplest request.
                if isinstance(reply, Reply) or not isinstance(best, Reply):
                    best = reply
                if isinstance(reply, Reply) and _has_rows(reply, wants_prompt=ask.wants_prompt):
                    self.extras[form], self.min_tokens[form] = extras, max_tokens if is_prompt else 0
                    return
        if isinstance(best, Refusal):
            self.refused[form] = str(best)
        else:
            self.without_rows.append(form)

    async def _answer(self, ask: Ask, extras: Mapping[str, Any]) -> Reply | Refusal:
        """Return a reply; treat one that cannot be parsed as a refusal, as servers' routes differ."""
        try:
            return await exchange(self.connection, ask, extras, self.model)
        except UnreachableError:
            raise
        except ServerError as error:
            if isinstance(error.__cause__, TimeoutError):  # the server is slow, and would be for every form
                raise
            return Refusal(200, str(error))


def _has_rows(reply: Reply, *, wants_prompt: bool) -> bool:
    """Return whether rows of the right kind came; without echo, only the generated token has one."""
    return len(reply.prompt or ()) > 2 if wants_prompt else bool(reply.completion)
