"""Figures for Prometheus: what came in, what went out, what was refused, where the time goes.

Before it: routes and the engine's own counts. After it: `GET /metrics`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

    from logprobe.engine.protocol import EngineBackend
    from logprobe.engine.request import RequestOutput
    from logprobe.processors.stages import ProcessorCounter


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self, engine: EngineBackend) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Engine requests by how they ended.", "state")
        self.replies = self._counter("http_replies", "HTTP replies by route and status.", "route", "status")
        self.tokens_in = self._counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self.tokens_out = self._counter("completion_tokens", "Tokens generated for requests that ended.")
        self.rows = self._counter("logprob_rows", "Rows of log-probabilities of requests that ended.")
        self.bytes_out = self._counter("logprob_bytes", "Bytes of log-probabilities sent.")
        self.rejected = self._counter("rejected", "Requests refused with 400, by field.", "param")
        self.registry.register(_EngineFigures(engine))

    def ended(self, output: RequestOutput) -> None:
        """Count a request that ended."""
        reason = "error" if output.error else output.outputs[0].finish_reason
        self.requests.labels(str(reason)).inc()
        self.tokens_in.inc(len(output.prompt_token_ids))
        self.tokens_out.inc(sum(len(one.token_ids) for one in output.outputs))
        records = [output.prompt_logprobs]
        for completion in output.outputs:
            records += [completion.logprobs, completion.processed_logprobs]
        self.rows.inc(sum(len(record) for record in records if record is not None))

    def aborted(self) -> None:
        """Count a request whose client went away."""
        self.requests.labels("abort").inc()

    def text(self) -> bytes:
        """All figures in Prometheus' text form."""
        return generate_latest(self.registry)

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        return Counter(f"logprobe_{name}", told, labels, registry=self.registry)


class _EngineFigures:
    """Reads the engine's counts when asked."""

    def __init__(self, engine: EngineBackend) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        """Name nothing ahead, so that registering asks the engine nothing."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """The figures of this moment."""
        stats = self._engine.stats()
        gauges = {
            "waiting_requests": ("Completions that wait for a place.", stats.waiting),
            "running_requests": ("Completions that run.", stats.running),
            "paused_requests": ("Completions that wait for their readers.", stats.paused),
            "free_slots": ("Tokens that the key/value pool can still take.", stats.free_slots),
        }
        for name, (told, value) in gauges.items():
            yield GaugeMetricFamily(f"logprobe_{name}", told, value)
        counters = {
            "cached_prompt_tokens": ("Prompt tokens not computed again.", stats.cached_tokens),
            "pauses": ("Times that a request was paused for its reader.", stats.pauses),
            "preemptions": ("Completions put back to make room.", stats.preempted),
        }
        for name, (told, value) in counters.items():
            yield CounterMetricFamily(f"logprobe_{name}", told, value)
        seconds = CounterMetricFamily(
            "logprobe_step_seconds", "Seconds of the engine's steps by part.", labels=["part"]
        )
        for part, spent in stats.seconds.items():
            seconds.add_metric([part], spent)
        yield seconds
        yield from _processor_figures(stats.processors)


def _processor_figures(counters: Mapping[str, ProcessorCounter]) -> Iterator[Metric]:
    figures = {
        "seconds": "Seconds in each logits processor.",
        "rows": "Rows given to each logits processor.",
        "failures": "Completions that each logits processor failed.",
    }
    for figure, told in figures.items():
        family = CounterMetricFamily(f"logprobe_processor_{figure}", told, labels=["processor"])
        for name, counter in counters.items():
            values = {"seconds": counter.seconds, "rows": counter.num_rows, "failures": counter.num_failures}
            family.add_metric([name], values[figure])
        yield family
