"""`audit`: send requests to a server, compare the replies with the exact rows, and report where they differ.

Requests are sent one at a time, except the concurrent ones of `circumstances`.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from logprobe.analysis.auditing.changes import compare_with_before
from logprobe.analysis.auditing.circumstances import Circumstances
from logprobe.analysis.auditing.compare import Comparison
from logprobe.analysis.auditing.endpoint import Connection, Endpoint
from logprobe.analysis.auditing.forms import CHAT_FORMS, PROMPT_FORMS, Ask, Reply
from logprobe.analysis.auditing.report import MAX_TEXT, AuditReport, Findings
from logprobe.analysis.auditing.rows import Reader, Reference
from logprobe.analysis.auditing.session import Session
from logprobe.analysis.auditing.tokens import Tokens
from logprobe.errors import require
from logprobe.transport.http_client import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from logprobe.analysis.auditing.session import Progress
    from logprobe.analysis.scorer import Scorer

T = TypeVar("T")
MAX_NATS: Final = 1e-3
MAX_TEXTS: Final = 32
MAX_PROMPT_TOKENS: Final = 48  # maximum length of a prompt whose whole rows are compared
GENERATED: Final = 12  # tokens generated per request
TEXTS: Final = (
    "The harbour was quiet in the early light, and the boats lay still.",
    "def area(width, height):\n    return width * height\n\nprint(area(3,",
    "In 1969, on 20 July, two people walked on the Moon for 2 hours and 31 minutes",
    "Das Wetter in München ist heute schön; à Paris, il pleut déjà 🌊 你好",
    "the cat the cat the cat the cat the cat the",
    "Q: What is the capital of France?\nA:",
)
CHATS: Final = (
    ({"role": "user", "content": "What is the capital of France? Answer with one word."},),
    (
        {"role": "system", "content": "You answer in short sentences."},
        {"role": "user", "content": "Name three colours."},
    ),
)
OF_ANOTHER: Final = (
    *("does-not-fit", "shifted", "temperature-unasked", "renormalised-unasked", "log-base", "probabilities"),
    *("bos", "lora-prompt", "lora-ignored"),
)
"""Kinds of faults that show that the server does not compute the distributions of the exact rows."""
PLAIN: Final[tuple[dict[str, Any], ...]] = ({"temperature": 0}, {"temperature": 1.0, "seed": 1})
SHAPES: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0.5, "seed": 2},
    {"temperature": 0.7, "top_p": 0.8, "seed": 3},
    {"temperature": 1.0, "frequency_penalty": 0.7, "presence_penalty": 0.3, "seed": 4},
    {"temperature": 1.0, "logit_bias": {" the": 3.0, " a": -2.0}, "seed": 5},
    {"temperature": 0.6, "top_p": 0.9, "frequency_penalty": 0.5, "seed": 6},
    {"temperature": 1.3, "top_k": 8, "seed": 7},
)
CHAT_SHAPES: Final = (PLAIN[0], {"temperature": 0.5, "top_p": 0.9, "seed": 8})


def audit(
    endpoint: str | Endpoint,
    llm: Scorer,
    *,
    model: str | None = None,
    texts: Sequence[str] | None = None,
    lora: str | None = None,
    before: AuditReport | None = None,
    max_nats: float = MAX_NATS,
    quick: bool = False,
    progress: Progress | None = None,
) -> AuditReport:
    """Compare the log-probabilities that a server returns with exact ones computed here.

    Args:
        endpoint: an OpenAI-compatible server: its URL, or an `Endpoint` with a key and limits.
        llm: the model that the server runs, loaded here, to compute the exact log-probabilities.
        model: the model's name on the server; None uses the first model that the server lists.
        texts: prompts; None uses the prompts in `before`, or six built-in ones.
        lora: the server's name for the LoRA adapter that `llm` runs with.
        before: an earlier report on the same endpoint, to find out what has changed.
        max_nats: maximum difference from the exact log-probabilities that passes, in nats; a bfloat16 server
            needs about 0.3.
        quick: test fewer prompt lengths and fewer concurrent requests.
        progress: called with the number of requests done and the current check.

    Raises:
        ParameterError: an argument is invalid, `lora` is set but `llm` runs without an adapter, or the server
            rejects the key.
        ServerError: the server cannot be reached, answers neither completions nor chats, or times out.
        MissingPackageError: httpx is not installed.
    """
    require(max_nats > 0, "max_nats", "must be positive", got=max_nats)
    is_list = not isinstance(texts, str) and (texts is None or len(texts) > 0)
    is_texts = is_list and all(isinstance(text, str) and text for text in texts or ())
    require(is_texts, "texts", "must be a list of non-empty texts", got=texts)
    tokens, findings = Tokens(llm.text), Findings()
    reader, base = Reader(tokens, Reference(llm)), None
    if lora is not None:
        require(llm.lora is not None, "lora", "needs a model with this adapter; pass llm.with_lora(NAME)")
        base = Reader(tokens, Reference(llm.with_lora(None)))
    comparison = Comparison(reader, base, findings, max_nats)
    max_len = int(llm.engine.capabilities().max_model_len)
    server = Endpoint(endpoint) if isinstance(endpoint, str) else endpoint

    async def run() -> AuditReport:
        async with Connection(server) as connection:
            session = Session(connection, len(llm.text.vocabulary), lora or model, progress)
            await session.meet()
            for form, message in session.absent.items():
                title = f"the server has no {form}: {printable(message, MAX_TEXT)}"
                findings.add("form", title, is_note=True)
            prompts = _prompts(texts, before, tokens, min(MAX_PROMPT_TOKENS, max_len - GENERATED - 2))
            replies = await _send_all(_asks(session, prompts, tokens), session, findings)
            session.tell("comparing")
            comparison.compare(replies)
            is_known = not findings.has(*OF_ANOTHER)
            steady = Circumstances(session, comparison, max_len, is_quick=quick, is_known=is_known)
            await steady.run()
        if before is not None:
            compare_with_before(before, comparison.stored, findings, max_nats)
        if reader.num_unknown:
            of = max(reader.num_rows, 1)
            findings.add("unidentified", is_note=True, count=reader.num_unknown, of=of)
        return AuditReport(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            endpoint=server.url,
            model=session.model or "",
            lora=lora,
            server=session.owner,
            ours=reader.reference.info,
            max_nats=max_nats,
            requests=connection.num_requests,
            rows=reader.num_rows,
            distributions=comparison.distributions,
            errors=tuple(comparison.errors),
            steadiness=tuple(steady.rows),
            findings=findings.listed(),
            stored=tuple(comparison.stored),
            worst_nats=max((error.worst for error in comparison.errors), default=0.0),
        )

    return in_new_loop(run)


def in_new_loop(run: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a new event loop, in a new thread if a loop already runs here (as in notebooks)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run())
    with ThreadPoolExecutor(1, thread_name_prefix="logprobe-audit") as pool:
        return pool.submit(lambda: asyncio.run(run())).result()


def _prompts(
    texts: Sequence[str] | None, before: AuditReport | None, tokens: Tokens, max_tokens: int
) -> list[str]:
    """Return the prompts to compare, each cut to at most `max_tokens` tokens."""
    if texts is None and before is not None:
        prompts = [prompt for prompt in before.stored if not prompt.ask.startswith("chat")]
        texts = [text for prompt in prompts if (text := tokens.edge.text_of(prompt.token_ids))]
    texts = texts or [text for text in TEXTS if tokens.can_encode(text)]
    return [tokens.cut(text, max_tokens) for text in dict.fromkeys(texts[:MAX_TEXTS])]


def _asks(session: Session, texts: Sequence[str], tokens: Tokens) -> Iterator[Ask]:
    """Yield every request whose rows are compared: prompts, then completions, then chats."""
    for form in PROMPT_FORMS:
        if form in session.extras:
            yield from (Ask(form=form, prompt=text) for text in texts)
            yield Ask(form=form, prompt=texts[0], params={"temperature": 0.5, "top_p": 0.9})
    if "completions" in session.extras:
        shaped = [(shape, text) for shape in PLAIN for text in texts]
        shaped += [(shape, text) for shape in SHAPES for text in (texts[0], texts[-1])]
        for shape, text in shaped:
            params = dict(shape)
            if "logit_bias" in shape:
                bias = shape["logit_bias"].items()
                params["logit_bias"] = {str(tokens.of_word(word)): value for word, value in bias}
            yield Ask(form="completions", prompt=text, max_tokens=GENERATED, params=params)
    for form in CHAT_FORMS:
        if form in session.extras and tokens.has_template:
            for shape in CHAT_SHAPES:
                for chat in CHATS:
                    yield Ask(form=form, prompt=chat, max_tokens=GENERATED, params=shape)


async def _send_all(asks: Iterator[Ask], session: Session, findings: Findings) -> list[tuple[Ask, Reply]]:
    replies = []
    await session.settle()
    for ask in asks:
        session.tell(ask.label)
        reply = await session.ask(ask)
        if isinstance(reply, Reply):
            replies.append((ask, reply))
        else:
            title = f"{ask.label} is not answered ({{count}} requests)"
            evidence = [ask.evidence(note=str(reply))]
            findings.add("form", title, is_note=True, evidence=evidence)
    return replies
