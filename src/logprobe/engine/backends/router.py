"""`Router`: chooses the engine that runs a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cachetools import LRUCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logprobe.transport.messages import Admitted

UP, SILENT, DOWN = range(3)  # engine status: responsive, not responding, not accepting requests
BLOCK: Final = 16  # tokens per block; prefixes are tracked in whole blocks
MAX_BLOCKS: Final = 1 << 14  # per engine


class Router:
    """Tracks the prefixes that each engine has run recently; not thread-safe."""

    def __init__(self, num_engines: int) -> None:
        self._known: list[LRUCache[int, None]] = [LRUCache(MAX_BLOCKS) for _ in range(num_engines)]
        self._chosen_at = [0] * num_engines
        self._count = 0

    def choose(self, admitted: Admitted, queued: Sequence[int], ranks: Sequence[int]) -> int:
        """Return the index of the engine that needs to run the fewest tokens to finish the request's prompt.

        Ties go to the least recently chosen engine. Once an engine is chosen, the prompt's prefixes count as
        known to it.

        Args:
            admitted: the request.
            queued: number of queued tokens, per engine.
            ranks: UP, SILENT or DOWN, per engine; only engines with the best of the given ranks are
                considered.
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
        """Forget the prefixes of one engine, or of all engines if `engine` is None."""
        for known in self._known if engine is None else [self._known[engine]]:
            known.clear()


def _blocks(admitted: Admitted) -> Iterator[int]:
    """Yield a hash for each whole block of the prompt; a hash covers all tokens up to the block's end."""
    ids = admitted.request.prompt_token_ids
    number = admitted.lora_number
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        number = hash((number, ids[start : start + BLOCK].tobytes()))
        yield number


def _num_known(known: LRUCache[int, None], blocks: Sequence[int]) -> int:
    """Return the number of known blocks before the first unknown block."""
    return next((index for index, block in enumerate(blocks) if block not in known), len(blocks))
