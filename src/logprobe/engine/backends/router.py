"""`Router`: which of several engines takes a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cachetools import LRUCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logprobe.transport.messages import Admitted

UP, SILENT, DOWN = range(3)  # engines that answer, that do not, and that take no requests
BLOCK: Final = 16  # tokens; prefixes are known by whole blocks
MAX_BLOCKS: Final = 1 << 14  # of each engine


class Router:
    """Remembers which prefixes each engine has run lately; one thread at a time."""

    def __init__(self, num_engines: int) -> None:
        self._known: list[LRUCache[int, None]] = [LRUCache(MAX_BLOCKS) for _ in range(num_engines)]
        self._chosen_at = [0] * num_engines
        self._count = 0

    def choose(self, admitted: Admitted, queued: Sequence[int], ranks: Sequence[int]) -> int:
        """The engine with the fewest tokens to run before this request has run its prompt.

        `queued` holds each engine's tokens still to run. Of equals the one goes first that was chosen longest
        ago. `ranks` are UP, SILENT or DOWN: one of a higher rank is chosen where there is no other.
        """
        blocks = list(_blocks(admitted))
        num_prompt = len(admitted.request.prompt_token_ids)
        costs = [
            (rank, tokens + num_prompt - BLOCK * _num_known(known, blocks), at)
            for rank, tokens, known, at in zip(ranks, queued, self._known, self._chosen_at, strict=True)
        ]
        chosen = costs.index(min(costs))
        self._count += 1
        self._chosen_at[chosen] = self._count
        self._known[chosen].update(dict.fromkeys(blocks))
        return chosen

    def forget(self, engine: int | None = None) -> None:
        """An engine's prefixes are gone; None: those of all."""
        for known in self._known if engine is None else [self._known[engine]]:
            known.clear()


def _blocks(admitted: Admitted) -> Iterator[int]:
    """A number for each whole block of the prompt, which stands for all tokens up to its end."""
    ids = admitted.request.prompt_token_ids
    number = admitted.lora_number
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        number = hash((number, ids[start : start + BLOCK].tobytes()))
        yield number


def _num_known(known: LRUCache[int, None], blocks: Sequence[int]) -> int:
    """How many blocks from the first on are known."""
    return next((index for index, block in enumerate(blocks) if block not in known), len(blocks))
