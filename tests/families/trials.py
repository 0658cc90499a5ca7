"""Compare an engine's numbers with transformers' for several ways of batching, chunking and caching."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from logprobe.config import EngineConfig
from logprobe.engine.engine import Engine
from logprobe.engine.forward import native
from logprobe.engine.forward.cpu import attention
from logprobe.engine.forward.torch import transformers_ready
from logprobe.engine.output_builder import Describer, OutputBuilder
from logprobe.models import ModelFiles
from logprobe.records import LogprobsInfo
from logprobe.sampling import SamplingParams
from logprobe.transport.messages import Request, Submit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logprobe.engine.request import RequestOutput
    from logprobe.text.edge import TextEdge
    from logprobe.transport.messages import Event

TOLERANCE = 2e-4  # nats
TOP = 4
NUM_NEW = 30


class Truth:
    """A model run by transformers: each text whole, alone, without a cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # Rotary embeddings may depend on the text's length; then a run is not valid for prefixes of its text.
        self._is_by_length = any(
            name in str(getattr(module, "rope_type", ""))
            for name in ("longrope", "dynamic")
            for module in model.modules()
        )
        self._rows: dict[tuple[int, ...], Any] = {}

    def rows(self, token_ids: Any) -> Any:
        """Return log-probabilities after each token, (num_tokens, vocabulary) float64, nats."""
        key = tuple(map(int, token_ids))
        if key not in self._rows:
            model = copy.deepcopy(self._model) if self._is_by_length else self._model
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([key]), use_cache=False).logits[0].double()
            self._rows[key] = logits.log_softmax(-1).numpy()
        return self._rows[key]

    def next_rows(self, token_ids: Any, start: int) -> Any:
        """Return the rows that predict each token from `start` on, by a run per prefix if lengths matter."""
        if not self._is_by_length:
            return self.rows(token_ids)[start - 1 : -1]
        return np.array([self.rows(token_ids[:end])[-1] for end in range(start, len(token_ids))])


def load(model: Any, weights: str, **settings: Any) -> native.NativeForward:
    """Load a copy of a model into the native engine and return its forward pass."""
    config = EngineConfig(
        model="tiny", weights=weights, kv_cache_memory_bytes=1 << 20, device="cpu", **settings
    )  # type: ignore[arg-type]

    def copied(_files: Any, *, dtype: torch.dtype, **_: Any) -> Any:
        return copy.deepcopy(model).to(dtype)

    with mock.patch.object(transformers_ready, "load_model", copied):
        return native.NativeForward(config, ModelFiles("tiny", Path("/nowhere")))


class Driven:
    """Drive an engine by hand; each call runs its requests together and checks the owner of every slot."""

    def __init__(self, forward: Any, text: TextEdge, **settings: Any) -> None:
        self._engine = Engine(EngineConfig(model="tiny", **settings), forward, text, frozenset())
        self._describer = Describer(LogprobsInfo(), forward.vocab_size, text.vocabulary)
        self._builders: dict[str, OutputBuilder] = {}

    def run(self, *requests: tuple[Any, SamplingParams]) -> list[RequestOutput]:
        outputs = []
        for ids, params in requests:
            name = str(len(self._builders))
            request = Request(request_id=name, prompt_token_ids=np.asarray(ids, np.int32), params=params)
            self._builders[name] = OutputBuilder(request, self._describer)
            outputs.append(self._builders[name].output)
            self._take(self._engine.handle(Submit((self._engine.admit(request),))))
        while self._engine.has_work:
            self._take(self._engine.step())
            self._engine.scheduler.check_integrity()
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            self._builders[event.request_id].add(event)


SCORED = SamplingParams(max_tokens=0, prompt_logprobs=TOP)
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0, logprobs=TOP, ignore_eos=True)


def prompts(vocab_size: int) -> dict[str, list[int]]:
    """Return texts below, across and beyond windows of 16 and boundaries of 32; two share a prefix."""
    rng = np.random.default_rng(5)
    long = rng.integers(3, vocab_size, 44).tolist()
    return {
        "long": long,
        "short": rng.integers(3, vocab_size, 9).tolist(),
        "sharing": [*long[:21], *rng.integers(3, vocab_size, 17).tolist()],
        "start": long[:24],  # a prefix with another length
    }


def differences(truth: Truth, forward: Any, text: TextEdge) -> Iterator[tuple[str, float]]:
    """Yield the name of each case and its largest difference from the reference, in nats."""
    texts = prompts(forward.vocab_size)
    settings = {"max_num_batched_tokens": 128, "max_num_seqs": 8}

    def scored(engine: Driven, *names: str) -> float:
        outputs = engine.run(*((texts[name], SCORED) for name in names))
        return max(
            _prompt_difference(truth, texts[name], output)
            for name, output in zip(names, outputs, strict=True)
        )

    yield "alone", scored(Driven(forward, text, **settings), "long")
    yield "short", scored(Driven(forward, text, **settings), "short")
    yield "batch", scored(Driven(forward, text, **settings), *texts)
    yield "chunked", scored(Driven(forward, text, max_num_batched_tokens=7, max_num_seqs=4), "long", "short")
    with mock.patch.object(attention, "is_short", return_value=False):
        yield "by the chunk kernel", scored(Driven(forward, text, **settings), *texts)
        pieces = Driven(forward, text, max_num_batched_tokens=23, max_num_seqs=4)
        yield "by the chunk kernel, in pieces", scored(pieces, "long", "short")
        with mock.patch.object(forward.pool, "is_readable_in_place", new=False):  # as on a GPU
            yield "by torch's attention", scored(Driven(forward, text, **settings), *texts)
    cached = Driven(forward, text, **settings)
    yield "cached", max(scored(cached, name) for name in ("long", "sharing", "start", "long"))
    engine = Driven(forward, text, **settings)
    yield "grown", _grown_difference(truth, texts["short"], engine)
    yield "grown together", _grown_difference(truth, texts["short"], engine, texts["start"], texts["long"])


def quick_differences(truth: Truth, forward: Any, text: TextEdge) -> Iterator[tuple[str, float]]:
    """Check two cases that cover the others: chunks of many prompts, then generation on a cached prefix."""
    texts = prompts(forward.vocab_size)
    engine = Driven(forward, text, max_num_batched_tokens=19, max_num_seqs=8)
    outputs = engine.run(*((ids, SCORED) for ids in texts.values()))
    for (name, ids), output in zip(texts.items(), outputs, strict=True):
        yield name, _prompt_difference(truth, ids, output)
    yield "grown", _grown_difference(truth, texts["short"], engine, texts["start"])


def how_layers_run(forward: Any) -> str:
    """Return the decoder, `native` or `transformers`."""
    return "native" if forward.layout.why_transformers is None else "transformers"


def _prompt_difference(truth: Truth, ids: list[int], output: RequestOutput) -> float:
    assert output.prompt_logprobs is not None
    return _difference(truth.rows(ids)[:-1], output.prompt_logprobs, first=1)


def _grown_difference(truth: Truth, ids: list[int], engine: Driven, *others: list[int]) -> float:
    """Compare a greedy continuation, whose tokens must be the reference's best up to ties."""
    output, *beside = engine.run((ids, GREEDY), *((other, GREEDY) for other in others))
    largest = 0.0
    for prompt, grown in zip((ids, *others), (output, *beside), strict=True):
        whole = [*prompt, *grown.outputs[0].token_ids]
        rows = truth.next_rows(whole, len(prompt))
        assert grown.outputs[0].logprobs is not None
        largest = max(largest, _difference(rows, grown.outputs[0].logprobs, first=0))
        taken = np.take_along_axis(rows, np.array(grown.outputs[0].token_ids)[:, None], 1)[:, 0]
        largest = max(largest, float((rows.max(-1) - taken).max()))
    return largest


def _difference(rows: Any, logprobs: Any, *, first: int) -> float:
    assert len(logprobs) == len(rows) + first
    largest = 0.0
    for row, entries in zip(rows, list(logprobs)[first:], strict=True):
        for token_id, entry in entries.items():
            largest = max(largest, abs(float(row[token_id]) - entry.logprob))
        best = sorted((entry.logprob for entry in entries.values()), reverse=True)[:TOP]
        largest = max(largest, float(np.abs(np.sort(row)[::-1][:TOP] - best).max()))
    return largest
