"""Prometheus metrics: requests, tokens, rejections, and time spent."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from typing import TYPE_CHECKING, Final, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from logprobe.engine.durations import BUCKETS_S as DURATION_BUCKETS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.core import Metric

    from logprobe.engine.front import Front
    from logprobe.engine.protocol import EngineStats
    from logprobe.engine.request import RequestOutput
    from logprobe.server.http.gate import Call

    Parts: TypeAlias = dict[tuple[str, ...], EngineStats]  # by label values: model and replica, if several


# Metric name → help text, and the field of `EngineStats` or `ProcessorCounter` with its value.
GAUGES: Final = {
    "waiting_requests": ("Completions that wait for a place.", "waiting"),
    "running_requests": ("Completions that run.", "running"),
    "paused_requests": ("Completions that wait for their readers.", "paused"),
    "free_slots": ("Tokens that the key/value pool can still take.", "free_slots"),
    "engine_up": ("Whether the engine takes requests: 1, or 0 while its process starts again.", "is_up"),
}
COUNTERS: Final = {
    "cached_prompt_tokens": ("Prompt tokens not computed again.", "cached_tokens"),
    "pauses": ("Times that a request was paused for its reader.", "pauses"),
    "preemptions": ("Completions put back to make room.", "preempted"),
    "drafted_tokens": ("Tokens guessed and verified by the model.", "drafted_tokens"),
    "accepted_tokens": ("Guessed tokens that were right.", "accepted_tokens"),
    "engine_restarts": ("Times that an engine process was started again.", "restarts"),
}
PROCESSOR_COUNTERS: Final = {
    "seconds": ("Seconds in each logits processor.", "seconds"),
    "rows": ("Rows given to each logits processor.", "num_rows"),
    "failures": ("Completions that each logits processor failed.", "num_failures"),
}


BUCKETS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
BUCKETS_ROWS: Final = (1, 8, 32, 128, 512, 2048, 8192, 32768)
# Metric name → help text, buckets, and the field of a `Call` with its value (None: not observed).
HISTOGRAMS: Final = {
    "request_seconds": ("Seconds from a request's header to the end of its reply.", BUCKETS_S, "seconds"),
    "time_to_first_token_seconds": (
        "Seconds from a request's header to the first token of its stream.",
        BUCKETS_S,
        "first_token_s",
    ),
    "time_between_tokens_seconds": (
        "Seconds a token between a stream's first one and its last.",
        BUCKETS_S,
        "token_s",
    ),
    "prompt_rows": ("Rows of log-probabilities of a request's prompts.", BUCKETS_ROWS, "prompt_rows"),
}
# Metric name → help text, and the key of `EngineStats.durations`.
DURATIONS: Final = {
    "queue_seconds": ("Seconds that each completion waited for its first step.", "queue"),
    "engine_step_seconds": ("Seconds of each of the engine's steps.", "step"),
}


class Metrics:
    """The metrics of one server, in its own registry."""

    def __init__(self, engines: Callable[[], Mapping[str, Front]], *, by_model: bool = False) -> None:
        """`engines` returns the loaded engines by model name; `by_model` adds a label `model`."""
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Engine requests by how they ended.", "state")
        self.replies = self._counter("http_replies", "HTTP replies by route and status.", "route", "status")
        self.tokens_in = self._counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self.tokens_out = self._counter("completion_tokens", "Tokens generated for requests that ended.")
        self.rows = self._counter("logprob_rows", "Rows of log-probabilities of requests that ended.")
        self.bytes_out = self._counter("logprob_bytes", "Bytes of log-probabilities sent.")
        self.rejected = self._counter("rejected", "Requests refused with 400, by field.", "param")
        help_text = "Unknown fields of requests that were ignored."
        self.ignored_fields = self._counter("ignored_fields", help_text)
        self._of_calls = {
            name: Histogram(
                f"logprobe_{name}", text, ("route", "model"), registry=self.registry, buckets=buckets
            )
            for name, (text, buckets, _) in HISTOGRAMS.items()
        }
        self.queued = Gauge(
            "logprobe_queued_requests",
            "HTTP requests that wait for room beside those of their client.",
            registry=self.registry,
        )
        help_text = "Connections that sent no HTTP request, or asked for another protocol."
        self.bad_connections = self._counter("bad_connections", help_text)
        self.registry.register(_EngineFigures(engines, by_model=by_model))
        self._lock = asyncio.Lock()  # one text is written at a time
        self._next: asyncio.Task[bytes] | None = None  # the write that waits for the lock

    def ended(self, output: RequestOutput) -> None:
        """Count an engine request that has ended."""
        reason = "error" if output.error else output.outputs[0].finish_reason
        self.requests.labels(str(reason)).inc()
        self.tokens_in.inc(len(output.prompt_token_ids))
        self.tokens_out.inc(sum(len(completion.token_ids) for completion in output.outputs))
        records = [output.prompt_logprobs]
        for completion in output.outputs:
            records += [completion.logprobs, completion.processed_logprobs]
        self.rows.inc(sum(len(record) for record in records if record is not None))

    def timed(self, call: Call) -> None:
        """Observe the durations of an HTTP request; ignore requests that reached no route or model."""
        if call.route is None or call.model is None:
            return
        for name, (_, _, field) in HISTOGRAMS.items():
            if (value := getattr(call, field)) is not None:
                self._of_calls[name].labels(call.route, call.model).observe(value)

    def aborted(self) -> None:
        """Count a request whose client disconnected."""
        self.requests.labels("abort").inc()

    async def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, collected after this call; for one event loop.

        A thread writes one text at a time; calls that arrive meanwhile share the next one.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._write())
        return await asyncio.shield(self._next)  # a disconnected client must not cancel the shared task

    async def _write(self) -> bytes:
        async with self._lock:
            self._next = None
            return await asyncio.to_thread(generate_latest, self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"logprobe_{name}", help_text, labels, registry=self.registry)


class _EngineFigures:
    """Prometheus collector that reads the engines' statistics at each scrape."""

    def __init__(self, engines: Callable[[], Mapping[str, Front]], *, by_model: bool) -> None:
        self._engines = engines
        self._by_model = by_model

    def describe(self) -> Iterator[Metric]:
        """Describe no metrics, so that registering the collector does not query the engines."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Collect the current metrics, labelled by model and by replica where there are several."""
        engines = self._engines()
        found = {name: engine.stats() for name, engine in engines.items()}
        is_told = {
            "model": self._by_model,
            "replica": any(stats.replicas for stats in found.values()),
        }
        labels = [label for label, is_there in is_told.items() if is_there]
        parts: Parts = {}
        for name, stats in found.items():
            for replica, part in (stats.replicas or {"": stats}).items():
                values = {"model": name, "replica": replica.removeprefix("replica ")}
                parts[tuple(values[label] for label in labels)] = part
        help_text = "The version of the model's weights that answer: 1 beside the one that does."
        of_model = [label for label in labels if label == "model"]
        weights = GaugeMetricFamily("logprobe_weights", help_text, labels=("version", *of_model))
        for name, engine in engines.items():
            weights.add_metric([engine.capabilities().weight_version or "", *([name] if of_model else [])], 1)
        yield weights
        for kind, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (help_text, field) in table.items():
                family = kind(f"logprobe_{name}", help_text, labels=labels)
                for label, part in parts.items():
                    family.add_metric(label, getattr(part, field))
                yield family
        help_text = "Seconds of the engine's steps by part."
        seconds = CounterMetricFamily("logprobe_step_seconds", help_text, labels=("part", *labels))
        for label, part in parts.items():
            for name, spent in part.seconds.items():
                seconds.add_metric([name, *label], spent)
        yield seconds
        for name, (help_text, field) in PROCESSOR_COUNTERS.items():
            family = CounterMetricFamily(
                f"logprobe_processor_{name}", help_text, labels=("processor", *labels)
            )
            for label, part in parts.items():
                for processor, counter in part.processors.items():
                    family.add_metric([processor, *label], getattr(counter, field))
            yield family
        for name, (help_text, of) in DURATIONS.items():
            histogram = HistogramMetricFamily(f"logprobe_{name}", help_text, labels=labels)
            for label, part in parts.items():
                if (durations := part.durations.get(of)) is not None:
                    bounds = [*map(str, DURATION_BUCKETS_S), "+Inf"]
                    buckets = list(zip(bounds, accumulate(durations.counts), strict=True))
                    histogram.add_metric(label, buckets, durations.seconds)
            yield histogram
