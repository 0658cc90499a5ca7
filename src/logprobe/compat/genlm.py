"""Classes named as in genlm-backend: asynchronous next-token language models, and capture of whole rows.

They do not need genlm-backend; `integrations.genlm` has subclasses of genlm-backend's `AsyncLM`, which do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names
from logprobe.compat.genlm_names import AsyncLM
from logprobe.next_token import Token
from logprobe.processors import GlobalLogprobsCapture

if TYPE_CHECKING:
    from logprobe.compat.genlm_vllm import AsyncVirtualLM

__all__ = ["AsyncLM", "AsyncVirtualLM", "GlobalLogprobsCapture", "Token"]

__getattr__ = lazy_names(__name__, {"AsyncVirtualLM": "logprobe.compat.genlm_vllm"})
