"""Score whole words after a prompt: a trie of their tokens, and the boundary that ends each word.

Run `python examples/trie.py --prompt "The sky is" blue grey green` (the default model is fetched once). A
word has ended where the next token does not go on with it, so its probability is that of its own tokens times
that of all tokens that may follow a whole word. Without the latter "light" would also count "lighthouse".
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from logprobe.next_token import AsyncLM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True)
class ScoredWord:
    """A word as the tokenizer spells it, after a space."""

    word: str
    num_tokens: int
    spelled: float  # nats: its own tokens
    ended: float  # nats: that the word ends there

    @property
    def logprob(self) -> float:
        """Nats of the word as a whole."""
        return self.spelled + self.ended


def ends_a_word(lm: AsyncLM) -> NDArray[np.bool_]:
    """(V,) whether a token may follow a whole word: it does not begin with a letter, digit or part of one."""
    goes_on = [token[:1].isalnum() or token[:1] == b"'" or token[:1] >= b"\x80" for token in lm.byte_vocab]
    ends = ~np.array(goes_on)
    ends[lm.tokenizer.all_special_ids] = True
    return ends


async def score_words(lm: AsyncLM, prompt: str, words: Sequence[str]) -> list[ScoredWord]:
    """Every word's log-probability after the prompt, the likeliest first; shared beginnings are run once."""
    prompt_ids = lm.tokenizer.encode(prompt)
    spellings = [lm.tokenizer.encode(f" {word}", add_special_tokens=False) for word in words]
    rows = await lm.trie_logprobs([[*prompt_ids, *ids] for ids in spellings])
    ends = ends_a_word(lm)
    scored = []
    for word, ids in zip(words, spellings, strict=True):
        path = [*prompt_ids, *ids]
        steps = range(len(prompt_ids), len(path))
        spelled = sum(float(rows[tuple(path[:at])][path[at]]) for at in steps)
        after = rows[tuple(path)].astype(np.float64)
        scored.append(ScoredWord(word, len(ids), spelled, float(np.logaddexp.reduce(after[ends]))))
    return sorted(scored, key=lambda one: -one.logprob)


def main() -> None:
    """Print a table of the words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompt", default="After the storm, the keeper went to the")
    parser.add_argument(
        "words", nargs="*", default=["light", "lighthouse", "harbour", "house", "sea", "lamp"]
    )
    given = parser.parse_args()
    with AsyncLM.from_name("smollm2") as lm:
        scored = asyncio.run(score_words(lm, given.prompt, given.words))
    print(f"{'word':<16}{'tokens':>7}{'spelled':>10}{'ended':>10}{'logprob':>10}  (nats)")
    for one in scored:
        print(f"{one.word:<16}{one.num_tokens:>7}{one.spelled:>10.4f}{one.ended:>10.4f}{one.logprob:>10.4f}")


if __name__ == "__main__":
    main()
