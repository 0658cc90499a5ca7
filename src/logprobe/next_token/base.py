"""`BaseLM`: row lookup, lifetime, settings and the default LoRA adapter of `NextTokenLM`."""

from __future__ import annotations

import asyncio
import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from logprobe.engine.backends.bridge import LoopThread
from logprobe.engine.request import check_tokens
from logprobe.errors import EngineClosedError, require
from logprobe.next_token.batcher import Batcher, check_batching, shut_down, shut_down_elsewhere
from logprobe.next_token.rows import Prefix, Token, row_params
from logprobe.text.edge import as_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    import numpy.typing as npt

    from logprobe.next_token.rows import Row, RowCache
    from logprobe.next_token.source import ModelText, RowSource
    from logprobe.records.values import IntArray

    TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


class BaseLM:
    """Base class that returns the rows of prefixes from the cache, or else requests them through the batcher.

    The arguments are described in `NextTokenLM`.
    """

    def __init__(
        self,
        source: RowSource,
        text: ModelText,
        *,
        on_rows: Callable[[list[Row]], object] | None,
        cache: RowCache,
        batch_size: int,
        timeout: float,
        owns_source: bool,
        bridge: LoopThread | None,
    ) -> None:
        check_batching(batch_size=batch_size, timeout=timeout)
        self._source = source
        self._text = text
        self._on_rows = on_rows
        self._cache = cache
        self._lora: str | None = None
        self._bridge = LoopThread() if bridge is None else bridge
        self._batcher = Batcher(source, cache, self._bridge, batch_size=batch_size, timeout_s=timeout)
        self._parts = (self._batcher, self._bridge, source if owns_source else None)
        # For an object dropped without `close`. The garbage collector may run on any thread, so the
        # shutdown gets a thread of its own.
        self._finalizer = weakref.finalize(self, shut_down_elsewhere, *self._parts)
        self._finalizer.atexit = False

    def set_lora(self, name: str) -> None:
        """Set the default LoRA adapter for later requests; requests in flight are not affected.

        Raises:
            ParameterError: no adapter with this name is loaded.
        """
        self._source.loads(name)
        self._lora = name

    def clear_lora(self) -> None:
        """Make the base model the default again."""
        self._lora = None

    def list_loras(self) -> dict[str, str]:
        """Return the loaded LoRA adapters as a map from name to path."""
        return self._source.list_loras()

    def clear_cache(self) -> None:
        """Clear the row cache; the engine's prefix cache is kept."""
        self._cache.clear()

    def reset_async_queries(self) -> None:
        """Abort all row requests in flight with `RequestAbortedError`."""
        self._check_open()
        self._batcher.reset()

    def close(self) -> None:
        """Abort requests in flight and release all resources. Later requests raise `EngineClosedError`.

        May be called more than once.
        """
        if self._finalizer.detach() is not None:
            self._cache.clear()
            shut_down(*self._parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    @property
    def batch_size(self) -> int:
        """Number of waiting requests at which an idle engine starts a step immediately; settable."""
        return self._batcher.batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        check_batching(batch_size=batch_size)
        self._batcher.batch_size = batch_size

    @property
    def timeout(self) -> float:
        """Seconds after which an idle engine starts a step even if fewer than `batch_size` wait; settable."""
        return self._batcher.timeout_s

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        check_batching(timeout=timeout)
        self._batcher.timeout_s = timeout

    @property
    def vocab_size(self) -> int:
        """Width of every row: the model's vocabulary size, which may exceed the tokenizer's."""
        return self._source.capabilities().vocab_size

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._text.tokenizer

    @cached_property
    def byte_vocab(self) -> list[Token]:
        """One `Token` per id, with its exact bytes, which are empty for ids that the tokenizer lacks."""
        return [Token(i, self._text.vocabulary.token_bytes(i)) for i in range(self.vocab_size)]

    @cached_property
    def str_vocab(self) -> list[str]:
        r"""Text of each id; bytes that are not complete UTF-8 are shown as `\xNN`, unknown ids as `<id>`."""
        return [self._text.vocabulary.token_text(i) for i in range(self.vocab_size)]

    async def _rows(
        self,
        prefixes: Iterable[TokenIds],
        lora: str | None,
        *,
        use_cache: bool = True,
        is_urgent: bool = False,
    ) -> list[Row]:
        """Return the rows of prefixes in order, from the cache or the batcher."""
        self._check_open()
        loads = self._source.loads(lora)
        keys = [Prefix(lora, *loads, self._as_prompt(ids).tobytes()) for ids in prefixes]
        rows = [self._cache.get(key) if use_cache else None for key in keys]
        # The longest prefix first: it runs as one chunk, and shorter ones then hit the prefix cache.
        missing = sorted(
            (i for i, row in enumerate(rows) if row is None), key=lambda i: -len(keys[i].token_bytes)
        )
        for i in missing:
            self._check(keys[i])
        waiters = self._batcher.ask((keys[i] for i in missing), is_urgent=is_urgent, uses_cache=use_cache)
        waits = map(asyncio.wrap_future, waiters)
        # Most calls wait for one row and need no `gather`.
        computed = [await next(waits)] if len(waiters) == 1 else await asyncio.gather(*waits)
        if 0 < len(missing) < len(keys) and self._has_other_weights(lora, loads):
            # The weights were replaced meanwhile: the cached rows belong to the old ones.
            ids = [key.token_ids for key in keys]
            return await self._rows(ids, lora, use_cache=use_cache, is_urgent=is_urgent)
        for i, row in zip(missing, computed, strict=True):
            rows[i] = row
        answer = [row for row in rows if row is not None]
        if self._on_rows is not None:
            self._on_rows(answer)
        return answer

    def _has_other_weights(self, lora: str | None, loads: tuple[int, int]) -> bool:
        """Return True if weights were replaced since `loads`; removing a LoRA adapter does not count."""
        is_loaded = lora is None or lora in self._source.list_loras()
        return is_loaded and self._source.loads(lora) != loads

    def _check(self, prefix: Prefix) -> None:
        """Raise `ParameterError` if a prefix is invalid; called before any row is computed."""
        limits = self._source.capabilities()
        check_tokens(
            prefix.token_ids,
            row_params(prefix.lora),
            max_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
        )

    def _as_prompt(self, token_ids: TokenIds) -> IntArray:
        """Return the ids as an (num_tokens,) int32 array; an empty prefix becomes the BOS token."""
        ids = as_token_ids(token_ids, "token_ids")
        if len(ids):
            return ids
        bos = self._text.bos_token_id
        require(bos is not None, "token_ids", "is empty and the model has no BOS; give at least one token")
        return np.array([bos], dtype=np.int32)

    def _chosen_lora(self, lora: str | None) -> str | None:
        """Return the LoRA adapter to use in a call: `lora`, or else the name passed to `set_lora`."""
        chosen = self._lora if lora is None else lora
        if chosen is not None:
            self._source.loads(chosen)  # raises if the adapter was removed; a cached row would hide that
        return chosen

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise EngineClosedError("this model was closed; make a new one")
