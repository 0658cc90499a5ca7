"""`NextTokenLM`: base class for models that return next-token distributions.

Its subclasses choose where rows are computed and what type of array callers get: `RemoteLLM` gets rows from a
server, and `EngineLM`, the base class of `AsyncLM` and `AsyncVirtualLM`, from an engine of this program. The
methods are defined in the base classes, grouped by topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from logprobe.next_token.distributions import Distributions
from logprobe.next_token.rows import ArrayT
from logprobe.next_token.samples import Samples

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from logprobe.engine.backends.bridge import LoopThread
    from logprobe.next_token.rows import Row, RowCache
    from logprobe.next_token.source import ModelText, RowSource

DEFAULT_CACHE_BYTES = 1 << 28


class NextTokenLM(Distributions[ArrayT], Samples, Generic[ArrayT]):
    """Language model that returns next-token rows: read-only (V,) float32 log-probabilities in nats.

    Methods may be called from any number of event loops and threads. Empty `token_ids` mean the BOS token, if
    the model has one. `lora` names a LoRA adapter; by default the one set with `set_lora` is used.

    Args:
        source: object that computes rows and samples.
        text: tokenizer and vocabulary of the model.
        as_caller: function that converts NumPy rows to the caller's array type. Its argument is a shared,
            read-only (V,) array or a new (n, V) array.
        on_rows: function that is called with the rows of each result before they are returned.
        cache: row cache.
        batch_size: number of waiting requests at which an idle engine starts a step immediately. A busy
            engine takes every request immediately.
        timeout: seconds from the first request after which an idle engine starts a step with fewer requests.
        owns_source: True if `close` also closes the source.
        bridge: event loop thread to share with the source, closed by `close`; None for a new one.

    Raises:
        ParameterError: a setting is invalid.
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
