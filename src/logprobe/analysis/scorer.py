"""What scoring asks of a model: pairs of ids with their context, and how long a sequence may be.

`LLM` is one; windows, surprisals, data sets and comparisons call nothing else of a model.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from logprobe.analysis.score import Score
    from logprobe.engine.front import Front
    from logprobe.records.values import IntArray
    from logprobe.text.boundary import Split
    from logprobe.text.edge import TextEdge

T = TypeVar("T")
R = TypeVar("R")
IN_FLIGHT = 2  # calls at once: the engine works on one while the next is made ready


class Scorer(Protocol):
    """A model that scores continuations."""

    @property
    def text(self) -> TextEdge:
        """Where its text meets ids."""

    @property
    def engine(self) -> Front:
        """What runs it."""

    @property
    def lora(self) -> str | None:
        """The LoRA weights that it runs on."""

    def score(
        self,
        pairs: Sequence[tuple[Any, Any] | Split],
        *,
        progress: bool = False,
        entropy: bool = False,
        varentropy: bool = False,
        unconditional: bool = False,
        logprobs: int = 0,
    ) -> list[Score]:
        """As `LLM.score`."""
        ...


def prefix_of(text: TextEdge, bos: bool | None) -> IntArray:
    """What stands before a text: by the tokenizer's own rule (None), always BOS or EOS, or never anything.

    Raises:
        ParameterError: BOS is asked for, and the model has neither BOS nor EOS.
    """
    if bos:
        return text.prefix()
    own = text.encode("") if bos is None else None
    starts_with_bos = own is not None and len(own) > 0 and own[0] == text.bos_token_id
    return text.prefix() if starts_with_bos else np.empty(0, np.int32)


def in_flight(call: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """`map` in order with the next item's call begun before this one's has ended, each on a thread."""
    pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="logprobe-scoring")
    running: deque[Any] = deque()
    try:
        for item in items:
            running.append(pool.submit(call, item))
            if len(running) == IN_FLIGHT:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
