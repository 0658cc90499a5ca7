"""`RemoteLM`: the async front door to a model behind HTTP, with the interface of `AsyncLM`.

It is `next_token`, which holds rows and asks, with a server started by `logprobe serve` as its source.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import final

from logprobe.engine.backends.bridge import LoopThread
from logprobe.integrations.remote.source import ServerRows
from logprobe.integrations.remote.text import RemoteText
from logprobe.next_token.lm import DEFAULT_CACHE_BYTES, NextTokenLM
from logprobe.next_token.rows import Row, RowCache


@final
class RemoteLM(NextTokenLM[Row]):
    """A model behind HTTP asked for next-token distributions; see `NextTokenLM` for all that it answers.

    Rows hold the server's float32 bits. Concurrent asks become one exchange, equal ones are computed once,
    and rows are kept on this side; prefixes are known on the server's. While the server is full, asks wait.
    `tokenizer`, `byte_vocab` and `str_vocab` come from the server when first used, and are the model's own.
    `list_loras` gives the LoRA weights that the server was started with. What is the server's alone, which is
    loading weights and forgetting prefixes, is refused here; labels have routes of their own there.

    Args:
        url: the server's address, with or without `/v1`.
        api_key: a key that the server lets in.
        cache_bytes: bytes of rows that are kept whole, least recently used out first; 0 keeps none.
        batch_size: asks that start an exchange at once.
        timeout: seconds after which the first of fewer asks starts one.
        request_timeout: seconds that one exchange may take, waits for a full server included.

    Raises:
        ModelError: httpx is not installed (`pip install 'logprobe[remote]'`).
        ParameterError: a setting that cannot be used, or the server refuses the key.
        ServerError: there is no such server, or it failed.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        batch_size: int = 64,
        timeout: float = 0.001,
        request_timeout: float = 600.0,
    ) -> None:
        cache = RowCache(cache_bytes)  # refused before the server is met
        with ExitStack() as undone:
            bridge = LoopThread()
            undone.callback(bridge.close)
            source = ServerRows(bridge, url, api_key, request_timeout)
            undone.callback(source.close)
            super().__init__(
                source,
                RemoteText(source.fetch),
                as_caller=lambda rows: rows,
                cache=cache,
                batch_size=batch_size,
                timeout=timeout,
                owns_source=True,
                bridge=bridge,
            )
            undone.pop_all()
