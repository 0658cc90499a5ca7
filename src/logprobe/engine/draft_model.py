"""`DraftModel`: drafts tokens with a second, smaller model, which has a KV cache of its own.

A draft is drawn with the same random number, temperature and truncation as the large model's token at that
position, so the two tokens are likely to be equal even if the request samples at random. The large model
verifies these drafts like those of `PromptLookup`, so they change no token.

The estimated probability that all drafts of a sample are accepted is the product of their acceptance rates,
each measured on earlier drafts of about the same confidence (as in EAGLE-2, Li et al. 2024). A draft that has
been made is verified if that saves time. The draft model runs for one more draft only if that saves time
including the run; the acceptance rate of the draft to come is estimated by that of all earlier drafts. While
drafts save no time, one step in `PROBE_STEPS` still makes and verifies some.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.engine.plan.drafts import FREE_ROWS, MAX_DRAFTS, STEP, least_chance
from logprobe.engine.plan.radix import EMPTY, SlotPool, shared_length
from logprobe.engine.protocol import StepBatch
from logprobe.kernels.placement import as_rows, inference_mode
from logprobe.records.rows import host_array
from logprobe.sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logprobe.engine.plan.sample import Sample
    from logprobe.engine.protocol import ForwardBackend, ModelShape
    from logprobe.records.values import IntArray

MAX_TOKENS: Final = 512  # in one forward pass of the draft model
NUM_BINS: Final = 10  # of draft confidence
PROBE_STEPS: Final = 16  # while drafts save no time, one step in 16 makes some, to notice when they do again

logger = logging.getLogger("logprobe")


@dataclass(slots=True)
class _Known:
    """The tokens of a sample that the draft model has run, and their slots in the draft model's KV cache."""

    params: SamplingParams  # with which drafts are drawn
    token_ids: IntArray = field(default_factory=lambda: EMPTY)
    slots: IntArray = field(default_factory=lambda: EMPTY)
    confidences: list[float] = field(default_factory=list)  # of the latest drafts


class DraftModel:
    """Drafts the next tokens of samples; used only by the engine's thread."""

    def __init__(self, forward: ForwardBackend, name: str, large: ModelShape, vocab_size: int) -> None:
        """Create a drafter with an empty KV cache.

        Args:
            forward: the draft model.
            name: its name, for reports.
            large: the shape of the large model, which verifies the drafts.
            vocab_size: width of the large model's logits.
        """
        self.name = name
        self._forward = forward
        self._pool = SlotPool(forward.num_slots)
        self._known: dict[Sample, _Known] = {}  # the sample drafted for last comes last
        self._sampler = Sampler()
        self._vocab_size = min(vocab_size, forward.vocab_size)
        # Relative to the large model: products per token, and bytes of weights read per step.
        self._products = _size(forward.shape, forward.vocab_size) / _size(large, vocab_size)
        has_bytes = forward.shape.weight_bytes and large.weight_bytes
        self._bytes = forward.shape.weight_bytes / large.weight_bytes if has_bytes else self._products
        # Acceptance rates by bin of confidence. At first, assume that the models agree more often than not.
        self._rates = [0.5 + 0.5 * (place + 0.5) / NUM_BINS for place in range(NUM_BINS)]
        self._rate = 1.0  # moving average over all drafts; high at first, so that some are made
        self._num_skipped = 0  # steps without drafts since the last one with drafts
        self._is_broken = False

    def least_chance(self, num_rows: int) -> float:
        """Return the minimum acceptance probability at which making a draft saves time; 1 or more: none does.

        As in `drafts.least_chance`, a step of the large model with r rows takes r + FREE_ROWS units of time:
        r for the products and FREE_ROWS for reading the weights. A step of the draft model takes its share of
        each: r · `_products` + FREE_ROWS · `_bytes`.
        """
        read = FREE_ROWS * self._bytes
        return (num_rows * (1 + self._products) + read) / (num_rows + FREE_ROWS)

    def draft(self, wanted: Mapping[Sample, int], num_rows: int) -> dict[Sample, list[int]]:
        """Return drafts of the samples' next tokens.

        Args:
            wanted: maximum number of drafts of each sample.
            num_rows: number of tokens that the step draws without drafts.
        """
        least_to_run = self.least_chance(num_rows)
        if self._is_broken or least_to_run >= 1:
            return {}
        if self._rate < least_to_run and self._num_skipped < PROBE_STEPS - 1:
            self._num_skipped += 1
            return {}
        # Drafts of a probe are verified whatever their confidence, so that low estimates can rise again.
        least = least_chance(num_rows) if self._rate >= least_to_run else 0.0
        self._num_skipped = 0
        try:
            return self._draft(wanted, least, least_to_run)
        except Exception:
            # Drafts only save time: go on without them.
            logger.exception("the draft model %s failed; no drafts are made with it from now on", self.name)
            self._is_broken = True
            return {}

    def observe(self, sample: Sample, num_drafted: int, num_accepted: int) -> None:
        """Learn how many of the drafts of a sample were accepted."""
        known = self._known.get(sample)
        if known is None or len(known.confidences) != num_drafted:
            return  # the drafts came from `PromptLookup`
        for place, confidence in enumerate(known.confidences[: num_accepted + 1]):
            is_accepted, bin_index = place < num_accepted, _bin(confidence)
            self._rates[bin_index] += STEP * (is_accepted - self._rates[bin_index])
            self._rate += STEP * (is_accepted - self._rate)
        known.confidences = []

    def forget(self, sample: Sample) -> None:
        """Free the slots of a sample."""
        known = self._known.pop(sample, None)
        if known is not None:
            self._pool.free(known.slots)

    def close(self) -> None:
        """Release the weights and the cache."""
        self._forward.close()

    def check_integrity(self) -> None:
        """Assert that each slot has one owner."""
        owned = np.concatenate([self._pool.free_slots(), *(known.slots for known in self._known.values())])
        assert len(owned) == len(np.unique(owned)) == self._pool.num_slots, "slots of the draft model"

    def _draft(
        self, wanted: Mapping[Sample, int], least: float, least_to_run: float
    ) -> dict[Sample, list[int]]:
        limit = self._forward.rope_boundary or self._forward.context_len
        drafts: dict[Sample, list[int]] = {}
        for sample, most in wanted.items():
            num_drafts = min(most, MAX_DRAFTS, limit - sample.num_tokens)
            if num_drafts > 0 and self._make_ready(sample, num_drafts, drafts):
                drafts[sample] = []
        most_of = {sample: min(wanted[sample], MAX_DRAFTS, limit - sample.num_tokens) for sample in drafts}
        chances = dict.fromkeys(drafts, 1.0)
        going = list(drafts)
        self._run_prompts(going)
        while going:
            self._run([(sample, self._unknown(sample, drafts[sample])) for sample in going])
            following = []
            for sample, token_id, confidence in self._drawn(going, drafts):
                rate = self._rates[_bin(confidence)]
                chances[sample] *= rate
                if chances[sample] < least or token_id >= self._vocab_size:
                    # Nothing verifies this draft, so it counts with its estimate.
                    estimate = rate if token_id < self._vocab_size else 0.0
                    self._rate += STEP * (estimate - self._rate)
                    continue
                drafts[sample].append(token_id)
                self._known[sample].confidences.append(confidence)
                is_worth = chances[sample] * self._rate >= least_to_run
                if is_worth and len(drafts[sample]) < most_of[sample]:
                    following.append(sample)
            going = following
        return {sample: made for sample, made in drafts.items() if made}

    def _make_ready(self, sample: Sample, num_drafts: int, others: Mapping[Sample, Any]) -> bool:
        """Free the slots of tokens that the sample no longer has, and make room for the tokens to run.

        If too few slots are free, slots of samples that are not in `others` are freed. Returns False if there
        are still too few.
        """
        known = self._known.pop(sample, None)
        if known is None:
            own = sample.request.params
            mode = "raw_logprobs" if own.is_greedy else "processed_logprobs"
            known = _Known(
                SamplingParams(
                    temperature=own.temperature,
                    top_k=own.top_k,
                    top_p=own.top_p,
                    min_p=own.min_p,
                    logprobs=0,
                    logprobs_mode=mode,  # type: ignore[arg-type]  # one of two literals
                )
            )
        self._known[sample] = known  # now the last
        known.confidences = []
        # The last token is always run, because the draft follows it.
        length = min(shared_length(known.token_ids, sample.token_ids), sample.num_tokens - 1)
        self._pool.free(known.slots[length:])
        known.token_ids, known.slots = known.token_ids[:length], known.slots[:length]
        need = sample.num_tokens - length + num_drafts
        for other in list(self._known):
            if self._pool.num_free - sum(map(self._reserved, others)) >= need:
                break
            if other is not sample and other not in others:
                self.forget(other)
        return self._pool.num_free - sum(map(self._reserved, others)) >= need

    def _reserved(self, sample: Sample) -> int:
        """Return how many slots a sample that is being drafted for may still take."""
        return sample.num_tokens - len(self._known[sample].slots) + MAX_DRAFTS

    def _unknown(self, sample: Sample, drafts: Sequence[int]) -> IntArray:
        """Return the tokens and drafts of a sample that the draft model has not run."""
        num_known = len(self._known[sample].token_ids)
        whole = np.append(sample.token_ids, np.array(drafts, np.int32)) if drafts else sample.token_ids
        return whole[num_known:].astype(np.int32)

    def _run_prompts(self, samples: Sequence[Sample]) -> None:
        """Run unknown tokens until so few are left that one pass can run those of all samples."""
        room = max(MAX_TOKENS // max(len(samples), 1), 1)
        for sample in samples:
            while len(unknown := self._unknown(sample, ())) > room:
                self._run([(sample, unknown[:MAX_TOKENS][: len(unknown) - 1])])

    def _run(self, parts: Sequence[tuple[Sample, IntArray]]) -> None:
        """Run tokens that follow the known tokens of each sample."""
        starts, positions, contexts, all_slots = [0], [], [], []
        for sample, token_ids in parts:
            known = self._known[sample]
            first = len(known.slots)
            slots = self._pool.allocate(len(token_ids))
            known.slots = np.concatenate([known.slots, slots])
            known.token_ids = np.concatenate([known.token_ids, token_ids])
            starts.append(starts[-1] + len(token_ids))
            positions.append(np.arange(first, first + len(token_ids), dtype=np.int32))
            contexts.append(known.slots)
            all_slots.append(slots)
        self._forward.run(
            StepBatch(
                token_ids=np.concatenate([token_ids for _, token_ids in parts]),
                positions=np.concatenate(positions),
                slots=np.concatenate(all_slots),
                starts=np.array(starts, np.int32),
                context_slots=contexts,
                loras=[None] * len(parts),
                draw_slots=np.array([slots[-1] for slots in all_slots], np.int32),
                are_long=[False] * len(parts),
            )
        )

    def _drawn(
        self, samples: Sequence[Sample], drafts: Mapping[Sample, Sequence[int]]
    ) -> list[tuple[Sample, int, float]]:
        """Draw the next draft of each sample; return it with its probability under the draft model."""
        slots = np.array([self._known[sample].slots[-1] for sample in samples], np.int32)
        logits = as_rows(self._forward.head(self._forward.hidden_rows(slots)))
        params = [self._known[sample].params for sample in samples]
        uniforms = np.array([sample.uniform(len(drafts[sample])) for sample in samples])
        with inference_mode(logits):
            drawn = self._sampler.sample(logits, params, uniforms)
        found = []
        for row, sample in enumerate(samples):
            raw, processed = drawn.cut(row, 1)
            rows = processed if raw is None or processed is not None else raw
            assert rows is not None, "log-probabilities were requested"
            confidence = float(np.exp(host_array(rows.logprobs)[0, 0]))
            found.append((sample, drawn.sampled_token_ids[row], confidence))
        return found


def _size(shape: ModelShape, vocab_size: int) -> float:
    """Return a number about proportional to the number of weights that a token is multiplied by."""
    return shape.num_layers * 12.0 * shape.hidden_size**2 + float(vocab_size) * shape.hidden_size


def _bin(confidence: float) -> int:
    return min(int(confidence * NUM_BINS), NUM_BINS - 1)
