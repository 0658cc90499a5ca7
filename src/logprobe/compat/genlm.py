"""genlm-backend's asynchronous next-token language models and its capture of whole rows.

`integrations.genlm` has subclasses of genlm-backend's `AsyncLM`, which need that package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names
from logprobe.async_lm import AsyncLM
from logprobe.next_token.rows import Token
from logprobe.processors import GlobalLogprobsCapture

if TYPE_CHECKING:
    from logprobe.integrations.vllm.virtual_lm import AsyncVirtualLM

__all__ = ["AsyncLM", "AsyncVirtualLM", "GlobalLogprobsCapture", "Token"]

__getattr__ = lazy_names(__name__, {"AsyncVirtualLM": "logprobe.integrations.vllm.virtual_lm"})
