"""`NextTokenLM`: a model asked for next-token distributions, whatever computes its rows.

`AsyncLM`, `AsyncVirtualLM` and `RemoteLM` derive from it; they say where rows come from and as what callers
get them. Its methods are in the classes that it joins, by concern.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from logprobe.next_token.answers import Answers
from logprobe.next_token.distributions import Distributions
from logprobe.next_token.rows import ArrayT
from logprobe.next_token.samples import Samples
from logprobe.next_token.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from logprobe.engine.backends.bridge import LoopThread
    from logprobe.next_token.rows import Row, RowCache
    from logprobe.next_token.source import ModelText, RowSource

DEFAULT_CACHE_BYTES = 1 << 28


class NextTokenLM(Distributions[ArrayT], Samples, Answers, Weights, Generic[ArrayT]):
    """A model asked for next-token distributions; rows are (V,) float32 log-probabilities in nats, read-only.

    Asks may come from any number of event loops and threads. `token_ids` may be empty where the model has a
    BOS, which then stands alone. `lora` names LoRA weights; without it those of `set_lora` are used.

    Args:
        source: what begins rows and samples.
        text: what the model's ids stand for.
        as_caller: rows as callers get them, from one (V,), shared and read-only, or (n, V) of their own.
        on_rows: shown the rows of each answer, before callers get them.
        cache: of rows that are kept whole.
        batch_size: asks that start a step at once where the engine is idle.
        timeout: seconds after which the first of fewer asks starts a step; a busy engine takes asks at once.
        owns_source: whether `cleanup` closes the source too.
        bridge: the loop of a source that needs one; it then serves both, and `cleanup` closes it.

    Raises:
        ParameterError: a setting that cannot be used.
    """

    def __init__(
        self,
        source: RowSource,
        text: ModelText,
        *,
        as_caller: Callable[[npt.NDArray[np.float32]], ArrayT],
        on_rows: Callable[[list[Row]], object] | None = None,
        cache: RowCache,
        batch_size: int,
        timeout: float,
        owns_source: bool,
        bridge: LoopThread | None = None,
    ) -> None:
        super().__init__(
            source,
            text,
            on_rows=on_rows,
            cache=cache,
            batch_size=batch_size,
            timeout=timeout,
            owns_source=owns_source,
            bridge=bridge,
        )
        self._as_caller = as_caller
