"""What one engine step found, as arrays: device side (`LogprobsTensors`).

Before it: the extraction kernels. After it: the per-request records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenLogprobs:
    """Log-probabilities of token ids that the caller named, any number a row."""

    offsets: Tensor  # (B + 1,) int64: row b owns entries [offsets[b], offsets[b + 1])
    token_ids: Tensor  # (N,) int32
    logprobs: Tensor  # (N,) float32, nats
    ranks: Tensor  # (N,) int32: 1 + number of strictly greater logits


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsTensors:
    """One row of logits each, reduced to the numbers asked for; column 0 is the chosen token."""

    token_ids: Tensor  # (B, k + 1) int32; row b holds num_logprobs[b] + 1 entries, the rest is undefined
    logprobs: Tensor  # (B, k + 1) float32, nats
    ranks: Tensor  # (B,) int32, of the chosen token: 1 + number of strictly greater logits
    lse: Tensor  # (B,) float32, log-sum-exp of the row's logits
    num_logprobs: Tensor  # (B,) int32, k of each row
    is_valid: Tensor  # (B,) bool; False where the row held NaN or +inf, or nothing but -inf
    entropy: Tensor | None = None  # (B,) float32, nats; None where it was not asked for
    given: GivenLogprobs | None = None
