"""`LLM` and `AsyncLLM`: the blocking and the asynchronous Python API; `model.Model` defines their methods."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from logprobe.calls import Async, Blocking
from logprobe.engine.backends.bridge import LoopThread
from logprobe.model import Model

if TYPE_CHECKING:
    from types import TracebackType


class LLM(Model, Blocking):
    """A model that generates and scores, with blocking calls; the model is loaded when the object is created.

    Args:
        model: a name or path as in `EngineConfig.model`, or a loaded transformers causal LM, which is copied
            in the requested `dtype` and not modified.
        tokenizer: the fast tokenizer of a loaded model; leave it out for a model given by name.
        max_logprobs: maximum number of alternatives per token that a call may request; -1 means no limit.
        settings: the other keywords of `EngineConfig`, such as `max_num_seqs=8`.

    Attributes:
        config: the `EngineConfig` that the model was loaded with.
        engine: the engine. `engine.capabilities()` describes the loaded model, its limits and its device,
            `engine.stats()` returns its statistics, and `engine.forget_prefixes()` empties the prefix cache;
            its other methods are internal.
        text: the engine's tokenizer. `text.encode(text)` returns token ids, and `text.text_of(token_ids)` and
            `text.bytes_of(token_ids)` decode them; its other methods are internal.
        processors: the logits processors, with `registered` (by name) and `counters` (their cost); None if
            the model runs in another process.

    Raises:
        ModelError: the model cannot be loaded.
        UnknownParameterError: a setting does not exist.
    """

    def _open(self) -> None:
        self._bridge = LoopThread()
        self._owned.callback(self._bridge.close)

    def close(self) -> None:
        """Release the model; a second call, or a call on a `with_lora` view, does nothing."""
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncLLM(Model, Async):
    """A model that generates and scores, with the methods of `LLM` as coroutines.

    Methods may be called from any event loop; requests of concurrent calls share engine steps, and
    cancelling a call aborts its requests. `stream` is an async generator. The arguments and attributes are
    those of `LLM`; loading the model blocks.

    Example:
        ```python
        async with AsyncLLM("smollm2") as llm:
            scores, outputs = await asyncio.gather(llm.score([("a", " b")]), llm.generate("a"))
        ```

    Raises:
        ModelError: the model cannot be loaded.
        UnknownParameterError: a setting does not exist.
    """

    async def close(self) -> None:
        """Release the model; a second call, or a call on a `with_lora` view, does nothing."""
        await asyncio.to_thread(self._owned.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
