"""This measures what a step costs beside the model: the processor's time for one of 8 requests.

The forward pass hands out rows of logits that are there already; all else is the engine: it plans, draws,
extracts, records and tells, and the requests' records grow. The same steps without logprobs stand beside.
"""

import time
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch
from harness import OURS, Figure, Options, alternate, parse_options, publish

from logprobe.engine.backends.thread import EngineThread
from logprobe.engine.output_builder import Describer, OutputBuilder
from logprobe.engine.protocol import StepBatch
from logprobe.kernels import threads
from logprobe.records import LogprobsInfo
from logprobe.sampling import SamplingParams
from logprobe.testing import FakeForward, fake_model
from logprobe.transport.messages import Request, Submit

BATCH, PROMPT_LEN, VOCAB_SIZE = 8, 16, 1024
ASKED = {
    "logprobs 5": {"logprobs": 5},
    "logprobs 20": {"logprobs": 20},
    "logprobs 5 with entropy": {"logprobs": 5, "entropy": True},
    "logprobs 5, raw and processed": {"logprobs": 5, "logprobs_mode": "both"},
}
BARE = "no logprobs"


class FreeForward(FakeForward):
    """Logits by slot that were drawn once."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE, num_slots=8192, context_len=1024)
        self._logits = torch.randn(64, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3

    def run(self, batch: StepBatch) -> None:
        """The rows are there."""

    def hidden_rows(self, slots: np.ndarray) -> torch.Tensor:
        """The slots themselves."""
        return torch.from_numpy(slots.astype(np.int64))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """One of the rows for each."""
        return self._logits[hidden % len(self._logits)]


class Race:
    """One engine that is stepped by hand."""

    def __init__(self, options: Options) -> None:
        self._num_steps = 4 if options.is_smoke else 400
        loaded = fake_model(FreeForward())
        assert isinstance(loaded.engine.core, EngineThread)
        loaded.engine.close()
        self._engine = loaded.engine.core.engine  # no front door steps by hand
        self._describer = Describer(LogprobsInfo(engine="fake"), VOCAB_SIZE, loaded.text.vocabulary)
        self._names = count()

    def measure(self, asked: dict[str, object], _number: int) -> float:
        """Microseconds of the processor a step, from the one after the prompts on."""
        params = SamplingParams(max_tokens=self._num_steps + 1, seed=1, ignore_eos=True, **asked)
        builders = {}
        for _ in range(BATCH):
            name = f"request-{next(self._names)}"
            ids = np.arange(PROMPT_LEN, dtype=np.int32)
            request = Request(request_id=name, prompt_token_ids=ids, params=params)
            builders[name] = OutputBuilder(request, self._describer)
            self._engine.handle(Submit((self._engine.admit(request),)))
        self._step(builders)
        start = time.process_time()
        for _ in range(self._num_steps):
            self._step(builders)
        seconds = time.process_time() - start
        assert all(builder.output.is_finished for builder in builders.values())
        return 1e6 * seconds / self._num_steps

    def _step(self, builders: dict[str, OutputBuilder]) -> None:
        for event in self._engine.step():
            builders[event.request_id].add(event)


def figures(options: Options) -> list[Figure]:
    """Each way to ask, and none, in turn."""
    race = Race(options)
    contestants = {name: partial(race.measure, asked) for name, asked in {BARE: {}, **ASKED}.items()}
    for measure in contestants.values():
        measure(-1)
    samples, notes = alternate(contestants, options.rounds)
    return [
        Figure(
            name=f"a step beside the model, batch {BATCH}, {name}",
            unit="µs of the processor",
            better="lower",
            samples={OURS: samples[name], BARE: samples[BARE]},
            notes=notes,
        )
        for name in ASKED
    ]


def main() -> None:
    """Run all figures."""
    options = parse_options(__doc__ or "")
    threads.set_num_threads(1)
    publish(Path(__file__).stem, figures(options), options)


if __name__ == "__main__":
    main()
