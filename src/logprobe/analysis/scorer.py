"""`Scorer`, the protocol of models that score continuations, and helpers for code that uses it.

`LLM` implements `Scorer`. The code for windows, surprisals, data sets and comparisons uses only those members
of a model that `Scorer` declares.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from logprobe.errors import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from logprobe.analysis.score import Score
    from logprobe.engine.front import Front
    from logprobe.engine.request import RequestOutput
    from logprobe.records.values import IntArray
    from logprobe.sampling import SamplingParams
    from logprobe.text.boundary import Split
    from logprobe.text.edge import TextEdge

T = TypeVar("T")
R = TypeVar("R")
IN_FLIGHT = 2  # concurrent calls: the next call is prepared while the engine works on one


class Scorer(Protocol):
    """A model that scores continuations."""

    @property
    def text(self) -> TextEdge:
        """Converts text to token ids and back."""

    @property
    def engine(self) -> Front:
        """The engine that runs the model."""

    @property
    def lora(self) -> str | None:
        """Name of the LoRA adapter in use, if any."""

    def score(
        self,
        pairs: Sequence[tuple[Any, Any] | Split],
        *,
        progress: bool = False,
        entropy: bool = False,
        varentropy: bool = False,
        unconditional: bool = False,
        logprobs: int = 0,
        logprob_token_ids: Any = None,
    ) -> list[Score]:
        """Score continuations; see `LLM.score`."""
        ...

    def with_lora(self, name: str | None) -> Scorer:
        """Return this model with a LoRA adapter, or without one; see `LLM.with_lora`."""
        ...

    def generate(self, prompts: Sequence[list[int]], sampling_params: SamplingParams) -> list[RequestOutput]:
        """Generate completions; see `LLM.generate`."""
        ...


def check_scorer(model: Any, name: str) -> None:
    """Raise `ParameterError` for the parameter `name` unless the value is a `Scorer`, such as an `LLM`."""
    is_scorer = hasattr(model, "engine") and not iscoroutinefunction(getattr(model, "score", None))
    require(is_scorer, name, "must be a loaded model, such as LLM('smollm2')", got=model)


def prefix_of(text: TextEdge, bos: bool | None) -> IntArray:
    """Return the ids to put before a text: BOS (EOS if the model has no BOS) or nothing.

    Args:
        text: encodes text.
        bos: True returns BOS, False nothing, and None returns BOS if the tokenizer puts it before texts.

    Raises:
        ParameterError: `bos` is True and the model has neither BOS nor EOS.
    """
    if bos:
        return text.prefix()
    own = text.encode("") if bos is None else None
    starts_with_bos = own is not None and len(own) > 0 and own[0] == text.bos_token_id
    return text.prefix() if starts_with_bos else np.empty(0, np.int32)


def in_flight(call: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield `call(item)` for each item, in order, running up to `IN_FLIGHT` calls at once in threads."""
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
