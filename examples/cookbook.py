"""The tasks of "Using logprobs" in OpenAI's cookbook, on `logprobe serve` with OpenAI's own client.

Run `logprobe serve smollm2`, and beside it `python examples/cookbook.py` (it needs `pip install openai`).
Each function is one of the page's eight tasks; nothing but the client's `base_url` differs from what the page
does. What a small model says is often wrong, and its numbers show how sure it was.
"""

from __future__ import annotations

import argparse
import math
from itertools import cycle
from typing import TYPE_CHECKING, Any

from openai import OpenAI

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice
    from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob as Row

HEADLINES = (
    "New laptop runs for three days on one charge.",
    "Council votes to build a tram to the harbour.",
    "Goalkeeper opens an exhibition of her paintings.",
)
CATEGORIES = "Technology, Politics, Sports, and Art"
ARTICLE = (
    "The lighthouse on Gull Rock was built in 1871 and lit with oil until 1926. Its keeper, Anna Lund, lived "
    "there for thirty years with her two sons. Since 1962 it has run without a keeper."
)
QUESTIONS = ("When was the lighthouse built?", "What were the names of the keeper's sons?")
SENTENCE = "My least favorite TV show is"
SURE, UNSURE = 0.95, 0.60
COLOURS = ("\x1b[34m", "\x1b[32m", "\x1b[35m", "\x1b[36m")
RESET = "\x1b[0m"


class Asker:
    """A model behind OpenAI's client."""

    def __init__(self, client: OpenAI, model: str | None = None) -> None:
        self._client = client
        self._model = client.models.list().data[0].id if model is None else model

    def __call__(self, question: str, *, max_tokens: int = 20, **options: Any) -> Choice:
        """Ask, greedily; the reply with what `options` ask for beside it."""
        reply = self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            temperature=0,
            seed=123,
            **options,
        )
        return reply.choices[0]

    def rows(self, question: str, *, num_top: int = 0, **options: Any) -> list[Row]:
        """Ask; each token of the reply with its log-probability, and so many alternatives."""
        choice = self(question, logprobs=True, top_logprobs=num_top, **options)
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        return choice.logprobs.content


def classified(ask: Asker, headline: str) -> str:
    """1. The category of a headline, as the model says it."""
    return ask(_category_of(headline)).message.content or ""


def classified_surely(ask: Asker, headline: str) -> list[tuple[str, float]]:
    """2. The two likeliest first tokens of that answer, and their probabilities."""
    first = ask.rows(_category_of(headline), num_top=2)[0]
    return [(entry.token, math.exp(entry.logprob)) for entry in first.top_logprobs]


def _category_of(headline: str) -> str:
    return (
        f"Put the headline of an article into one of the categories {CATEGORIES}. "
        f"Answer with the name of the category alone.\nHeadline: {headline}"
    )


def has_sufficient_context(ask: Asker, question: str) -> list[tuple[str, float]]:
    """3. Whether an article answers a question: each token of True or False with its probability."""
    return [(row.token, math.exp(row.logprob)) for row in ask.rows(_is_in_article(question), max_tokens=3)]


def sufficient_context_score(ask: Asker, question: str) -> float | None:
    """4. The share of True among True and False as the first token; None where neither is among the best."""
    first = ask.rows(_is_in_article(question), num_top=20, max_tokens=1)[0]
    found = {entry.token: math.exp(entry.logprob) for entry in first.top_logprobs}
    yes, no = found.get("True", 0.0), found.get("False", 0.0)
    return yes / (yes + no) if yes + no else None


def _is_in_article(question: str) -> str:
    return (
        f"You have this article: {ARTICLE}\nThe question is: {question}\nIs there enough information in the "
        "article to answer it in full? Answer with one word, True or False, and nothing else."
    )


def completions(ask: Asker, sentence: str) -> dict[str, list[tuple[str, float]]]:
    """5. What may come next, by how much of a sentence is there: three tokens, each with its probability."""
    words = sentence.split()
    beginnings = [" ".join(words[:end]) for end in range(1, len(words) + 1)]
    asked = "Go on with this sentence as autocomplete would, to one whole sentence: {}"
    return {
        beginning: [
            (entry.token, math.exp(entry.logprob))
            for entry in ask.rows(asked.format(beginning), num_top=3, max_tokens=1)[0].top_logprobs
        ]
        for beginning in beginnings
    }


def highlighted(ask: Asker, question: str) -> tuple[str, int]:
    """6. The answer with each token in the next colour of a terminal, and how many tokens it has."""
    rows = ask.rows(question, max_tokens=40)
    coloured = [colour + row.token for colour, row in zip(cycle(COLOURS), rows, strict=False)]
    return "".join(coloured) + RESET, len(rows)


def from_bytes(ask: Asker, question: str) -> tuple[str, float]:
    """7. The answer put together from its tokens' bytes, as emoji need it, and its log-probability (nats)."""
    rows = ask.rows(question)
    data = b"".join(bytes(row.bytes or []) for row in rows)
    return data.decode(errors="replace"), sum(row.logprob for row in rows)


def perplexity(ask: Asker, question: str) -> tuple[str, float]:
    """8. An answer and its perplexity: the lower, the surer the model was of its words."""
    choice = ask(question, logprobs=True, max_tokens=60)
    assert choice.logprobs is not None
    rows = choice.logprobs.content or []
    return choice.message.content or "", math.exp(-sum(row.logprob for row in rows) / len(rows))


def main() -> None:
    """Do all eight against a server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none", help="of a server that was started with one")
    arguments = parser.parse_args()
    ask = Asker(OpenAI(base_url=arguments.url, api_key=arguments.key))
    for headline in HEADLINES:
        print(f"{headline} {classified(ask, headline)!r} {_shown(classified_surely(ask, headline))}")
    for question in QUESTIONS:
        score = sufficient_context_score(ask, question)
        print(f"{question} {_shown(has_sufficient_context(ask, question))}, share of True {score}")
    for beginning, entries in completions(ask, SENTENCE).items():
        best = entries[0][1]
        verdict = "suggested" if best > SURE else "not sure" if best < UNSURE else "perhaps"
        print(f"{beginning} … {_shown(entries)} {verdict}")
    text, num_tokens = highlighted(ask, "What is the longest word in the English language?")
    print(f"{text}\n{num_tokens} tokens")
    text, logprob = from_bytes(ask, "Write the blue heart emoji and its name.")
    print(f"{text!r} {logprob:.3f} nats, {math.exp(logprob):.2%}")
    for question in ("What is the capital of France?", "In one sentence, what will machines think of us?"):
        text, value = perplexity(ask, question)
        print(f"{question} {text!r} perplexity {value:.2f}")


def _shown(entries: list[tuple[str, float]]) -> str:
    return ", ".join(f"{token!r} {probability:.1%}" for token, probability in entries)


if __name__ == "__main__":
    main()
