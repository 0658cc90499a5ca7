"""Verify at load that a decoder gives the reference's logits.

The reference (`TransformersProof` or `ReferenceProof`) runs short texts at the model's first and last
positions, and across every length at which its rotary frequencies may change. Then the decoder runs the same
texts, packed into one step, through every attention path: whole texts, and texts whose first part is in the
KV cache. The logits must agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.errors import UnsupportedModelError
from logprobe.models.sources import host_array

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from logprobe.engine.forward.cpu.decoder import Decoder
    from logprobe.engine.forward.kv_cache import KVPool
    from logprobe.engine.forward.torch.cuda.decoder import CudaDecoder
    from logprobe.engine.forward.torch.transformers_decoder import TransformersDecoder

    AnyDecoder = Decoder | TransformersDecoder | CudaDecoder

NUM_TOKENS: Final = 12
# Relative to the largest logit. Another order of summation causes smaller differences, and a wrong formula
# far larger ones. Single rows of smollm2 differ by 0.008 in float16 and by 0.15 in bfloat16.
TOLERANCE: Final = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.3}


@dataclass(frozen=True, slots=True)
class Reference:
    """Logits of some tokens, computed by the reference."""

    token_ids: NDArray[np.int64]  # (num_tokens,)
    positions: NDArray[np.int64]  # (num_tokens,)
    logits: NDArray[np.float32]  # (num_tokens, vocabulary)
    is_long: bool


class Proof:
    """Reference logits of a model, with which decoders' logits are compared."""

    verified_against: str  # see `LogprobsInfo.verified_against`
    references: list[Reference]
    largest_difference: float = 0.0  # nats; of the last `prove`

    def __init__(
        self,
        *,
        context_len: int,
        rope_boundary: int | None,
        dtype: str,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.context_len, self.rope_boundary = context_len, rope_boundary
        self.dtype, self.vocab_size, self.eos_token_ids = dtype, vocab_size, eos_token_ids

    def prove(self, decoder: AnyDecoder, *, tolerance: float | None = None) -> KVPool:
        """Compare a decoder's logits with the reference on every attention path.

        Args:
            decoder: the decoder to verify.
            tolerance: maximum difference, relative to the largest logit; None: the default for the dtype.

        Returns:
            A KV cache that the decoder has filled.

        Raises:
            UnsupportedModelError: the logits differ by more than `tolerance`.
        """
        self.largest_difference = 0.0
        self._tolerance = TOLERANCE[self.dtype] if tolerance is None else tolerance
        pools = [
            self._prove_together(decoder, references)
            for is_long in (False, True)
            if (references := [one for one in self.references if one.is_long == is_long])
        ]
        return pools[0]

    def _prove_together(self, decoder: AnyDecoder, references: list[Reference]) -> KVPool:
        """Run references packed into one step; all use the short rotary frequencies, or all the long ones."""
        lengths = [len(reference.token_ids) for reference in references]
        pool = decoder.new_pool(sum(lengths))
        decoder.record_on(pool, max(lengths))
        prompts = slots_of(lengths)
        plan: Any  # `AttentionPlan` or `SpanPlan`, as the decoder needs
        for starts, plan in decoder.all_plans(pool, prompts):
            pairs = list(zip(references, starts, strict=True))
            hidden: Any = decoder(
                np.concatenate([reference.token_ids[start:] for reference, start in pairs]),
                np.concatenate([reference.positions[start:] for reference, start in pairs]),
                plan,
                is_long=references[0].is_long,
            )
            expected = np.concatenate([reference.logits[start:] for reference, start in pairs])
            self._compare(host_array(decoder.head(hidden)), expected)
        return pool

    def _compare(self, logits: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        if np.isnan(expected).any() or not np.isfinite(expected).any():
            raise UnsupportedModelError(f"its logits in {self.verified_against} are not finite")
        is_finite = np.isfinite(expected)  # some families mask padding entries of the vocabulary
        scale = np.abs(expected[is_finite]).max()
        difference = float(np.abs(logits[is_finite] - expected[is_finite]).max() / scale)
        if not difference <= self._tolerance:
            raise UnsupportedModelError(self._why_not(difference))
        nats = np.abs((_log_softmax(logits) - _log_softmax(expected))[is_finite]).max()
        self.largest_difference = max(self.largest_difference, float(nats))

    def _why_not(self, difference: float) -> str:
        """Return the reason for rejecting a decoder whose logits have this relative difference."""
        reference = self.verified_against
        return f"the engine's logits differ from those of {reference} (relative difference {difference:.1e})"

    def _starts(self, original_lengths: Collection[int]) -> list[int]:
        """Return the start positions of the texts: the first, the last that fits, and one per boundary.

        A boundary is a length at which the rotary frequencies may change.
        """
        last = self.context_len - NUM_TOKENS
        across = {length - NUM_TOKENS // 2 for length in original_lengths}
        if self.rope_boundary is not None:
            across.add(self.rope_boundary - NUM_TOKENS)  # the last positions with short frequencies
        return sorted({0, max(last, 0), *(start for start in across if 0 < start < last)})

    def _is_long(self, start: int) -> bool:
        return self.rope_boundary is not None and start + self._count > self.rope_boundary

    @property
    def _count(self) -> int:
        return min(NUM_TOKENS, self.context_len)

    def _probe_ids(self, special: Collection[int], *, seed: int) -> NDArray[np.int64]:
        """Return reproducible random token ids, without special ids such as padding or image tokens."""
        order = np.random.default_rng(seed).permutation(self.vocab_size)[: self._count + len(special)]
        return np.array([token_id for token_id in order if token_id not in special][: self._count])


def slots_of(lengths: Sequence[int]) -> list[NDArray[np.int64]]:
    """Return the KV cache slots of texts that lie one after another, (length,) int64 for each."""
    return np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised


def special_ids(*contents: dict[str, Any]) -> set[int]:
    """Return the token ids in contents of config.json: the values of all keys that end in `token_id`."""
    values = [value for content in contents for name, value in content.items() if name.endswith("token_id")]
    lists = [value if isinstance(value, list) else [value] for value in values]
    return {one for ids in lists for one in ids if isinstance(one, int)}
