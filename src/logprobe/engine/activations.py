"""`StepActivations`: hidden states, expert routes and logit-lens predictions of a step's tokens.

The last layer's states are stored by KV slot, so cached tokens have them too. The states of inner layers and
the routes exist only while a step runs, so a sample that reports them uses no cached tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.engine.plan.capture import Tail
from logprobe.engine.protocol import Capture
from logprobe.errors import UnsupportedModelError
from logprobe.kernels.extraction.head import head_extract
from logprobe.kernels.placement import as_rows
from logprobe.records.rows import host_array
from logprobe.transport.messages import Finish

MAX_BYTE: Final = 256  # with at most this many experts per layer, routes are uint8, else uint16

if TYPE_CHECKING:
    from logprobe.engine.plan.sample import Sample
    from logprobe.engine.plan.scheduler import StepPlan
    from logprobe.engine.protocol import ForwardBackend, StepBatch
    from logprobe.engine.recorder import Recorder, StepDeltas
    from logprobe.kernels.arrays import Array
    from logprobe.records.rows import HostRows


class StepActivations:
    """The activations that one step has kept, by sample and position."""

    def __init__(self, forward: ForwardBackend, plan: StepPlan, batch: StepBatch) -> None:
        """Choose what the step must keep for the samples in `plan.captured`."""
        self._forward = forward
        self.batch = batch  # with a capture if inner layers are needed
        self._first: dict[Sample, tuple[int, int]] = {}  # first token: row in capture, position
        self._num_run: dict[Sample, int] = {}  # tokens of the sample in the step
        layers: set[int] = set()
        reports_routes = False
        tokens: list[Array] = []
        for index, span in enumerate(plan.tokens):
            if span.sample.capture is None or not span.sample.is_fresh:
                continue
            layers |= span.sample.capture.inner(forward.shape)
            reports_routes |= span.sample.capture.routes
            self._first[span.sample] = sum(map(len, tokens)), span.start
            self._num_run[span.sample] = len(span)
            tokens.append(np.arange(batch.starts[index], batch.starts[index + 1], dtype=np.int32))
        if not tokens:
            return
        num_rows = sum(map(len, tokens))
        capture = Capture(
            tokens=np.concatenate(tokens),
            rows=np.arange(num_rows, dtype=np.int32),
            layers=tuple(sorted(layers)),
            hidden=np.empty((num_rows, len(layers), forward.shape.hidden_size), np.float32),
            routes=self._new_routes(num_rows) if reports_routes else None,
            given=self._given(plan, num_rows),
        )
        self.batch = replace(batch, capture=capture)

    def _new_routes(self, num_rows: int) -> Array:
        shape = self._forward.shape
        return np.full((num_rows, shape.num_expert_layers, shape.experts_per_token), -1, np.int32)

    def _given(self, plan: StepPlan, num_rows: int) -> Array | None:
        """Return the expert routes that requests prescribe for the step's tokens; None if there are none."""
        spans = [span for span in plan.tokens if span.sample.is_private]
        if not spans:
            return None
        routes = self._new_routes(num_rows)
        for span in spans:
            assert span.sample.capture is not None
            assert span.sample.capture.given is not None, "private samples have given routes"
            given = span.sample.capture.given[span.start : span.end]
            row, _ = self._first[span.sample]
            routes[row : row + len(given)] = given
        return routes

    def collect(self, plan: StepPlan, step: StepDeltas, recorder: Recorder) -> None:
        """Add the activations of a step's tokens to the step's deltas; end samples that have reported all."""
        capture = self.batch.capture
        for sample in plan.captured:
            own = sample.capture
            assert own is not None
            if capture is not None and capture.errors and sample in self._first:
                recorder.finish(step, sample, Finish("error", error=capture.errors[0]))
            if sample.end is not None and sample.end.error is not None:
                continue
            end = min(sample.num_computed, own.num_prompt)
            if end > own.num_done:
                delta = recorder.delta_in(step, sample)
                if own.hidden:
                    delta.prompt_hidden = self._hidden(sample, own.num_done, end)
                if own.routes:
                    delta.prompt_routes = self._routes(sample, own.num_done, end)
                if own.lens:
                    try:
                        delta.lens = self._lens(sample, own.num_done, end)
                    except UnsupportedModelError as error:
                        recorder.finish(step, sample, Finish("error", error=error))
                own.num_done = end
            new = step.deltas[sample].token_ids if sample in step.deltas else []
            first = sample.num_tokens - len(new) - 1  # the token before the first new one
            if new and own.hidden:
                step.deltas[sample].hidden = self._hidden(sample, first, first + len(new))
            if new and own.routes:
                step.deltas[sample].routes = self._routes(sample, first, first + len(new))
            if capture is not None and sample in self._first:
                last = self._first[sample][0] + self._num_run[sample] - 1
                routes = None if capture.routes is None else capture.routes[last].copy()
                own.tail = Tail(capture.layers, capture.hidden[last].copy(), routes)
            is_reported = own.num_done == own.num_prompt and sample.num_scored >= sample.num_prompt_rows
            if is_reported and not sample.wants_sample:
                recorder.finish(step, sample, Finish("length"))

    def _hidden(self, sample: Sample, start: int, end: int) -> Array:
        """Return the requested states of positions [start, end), (positions, layers * size) float32."""
        assert sample.capture is not None
        parts = [self._states(sample, layer, start, end) for layer in sample.capture.hidden]
        return np.stack(parts, axis=1).reshape(end - start, -1)

    def _states(self, sample: Sample, layer: int, start: int, end: int) -> Array:
        """Return hidden state `layer` of positions [start, end), (positions, hidden size) float32."""
        if layer == self._forward.shape.num_layers:
            states: Array = host_array(self._forward.hidden_rows(sample.kept_slots(start, end)))
            return states.astype(np.float32, copy=False)
        if sample not in self._first:
            # The token is drawn in a later step than the one that ran the token before it.
            tail = _tail_of(sample)
            states = tail.hidden[tail.layers.index(layer)][None]
        else:
            capture = self._capture
            states = capture.hidden[self._rows(sample, start, end), capture.layers.index(layer)]
        return states

    def _routes(self, sample: Sample, start: int, end: int) -> Array:
        """Return the routes of positions [start, end), (positions * layers, experts per token)."""
        if sample not in self._first:  # as in `_states`
            routes = _tail_of(sample).routes
            assert routes is not None, "the sample reports routes"
            found = routes[None]
        else:
            assert self._capture.routes is not None, "the sample reports routes"
            found = self._capture.routes[self._rows(sample, start, end)]
        dtype = np.uint8 if self._forward.shape.num_experts <= MAX_BYTE else np.uint16
        return found.reshape(-1, found.shape[-1]).astype(dtype)

    @property
    def _capture(self) -> Capture:
        assert self.batch.capture is not None, "a step that runs tokens of a fresh sample has a capture"
        return self.batch.capture

    def _rows(self, sample: Sample, start: int, end: int) -> slice:
        """Return the rows of positions [start, end) in the capture."""
        row, position = self._first[sample]
        return slice(row + start - position, row + end - position)

    def _lens(self, sample: Sample, start: int, end: int) -> list[HostRows]:
        """Return rows of log-probabilities after positions [start, end), for each layer of the lens.

        A row's chosen token is the next token of the text; after the last one, the model's most likely token.
        """
        assert sample.capture is not None
        forward, slots = self._forward, sample.kept_slots(start, end)
        head: Any = forward.head
        if sample.head_lora is not None:
            head = partial(forward.head, lora=sample.head_lora)
        next_ids = sample.token_ids[start + 1 : end + 1]
        if len(next_ids) < end - start:
            logits = host_array(as_rows(head(forward.hidden_rows(slots[-1:]))))
            next_ids = np.append(next_ids, logits[0].argmax()).astype(np.int32)
        k = forward.vocab_size if sample.capture.k == -1 else min(sample.capture.k, forward.vocab_size)
        rows = []
        for layer in sample.capture.lens:
            if layer == forward.shape.num_layers:
                states = forward.hidden_rows(slots)
            else:
                states = forward.normed(self._states(sample, layer, start, end))
            rows.append(head_extract(states, head, next_ids, k, entropy=True).to_host())
        return rows


def _tail_of(sample: Sample) -> Tail:
    assert sample.capture is not None
    assert sample.capture.tail is not None, "the sample has run a token"
    return sample.capture.tail
