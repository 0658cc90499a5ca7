"""`RemoteLLM`: next-token distributions from a server, with the interface of `AsyncLM`.

`NextTokenLM` batches requests and caches rows; a server started by `logprobe serve` computes them.
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
class RemoteLLM(NextTokenLM[Row]):
    """A model on a server that returns next-token distributions; see `NextTokenLM` for its methods.

    Rows have exactly the server's float32 values. Concurrent requests share an HTTP request, equal ones are
    computed once, and rows are cached locally; the server caches prefixes. While the server is full, requests
    wait. `tokenizer`, `byte_vocab` and `str_vocab` are fetched from the server on first use. `list_loras`
    returns the LoRA adapters that the server had when this object was created. Methods
    that change the server's weights or caches are absent. For completions, scores and labels use the server's
    routes, for example with OpenAI's client.

    Args:
        url: the server's address, with or without `/v1`.
        api_key: the server's API key.
        cache_bytes: maximum size in bytes of the LRU cache of rows; 0 disables the cache.
        batch_size: number of pending requests at which an HTTP request is sent immediately.
        timeout: seconds after which an HTTP request is sent for fewer pending requests.
        request_timeout: timeout of one HTTP request in seconds, including retries while the server is full.

    Raises:
        MissingPackageError: httpx is not installed (`pip install 'logprobe[remote]'`).
        ParameterError: a setting is invalid, or the server rejects the API key.
        ServerError: the server cannot be reached, or failed.
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
        cache = RowCache(cache_bytes)  # validates before the server is contacted
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
