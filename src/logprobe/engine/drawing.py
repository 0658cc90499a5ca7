"""`Drawing`: one chunk of a step's rows of logits → a token each, and the numbers asked about them.

Before it: the output head, this engine's or another's. After it: `Recorder`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logprobe.kernels import extract
from logprobe.records.host import on_host

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.engine.plan.sample import Draw
    from logprobe.engine.processing import Processing
    from logprobe.records.store.columns import Array
    from logprobe.sampling import Sampler
    from logprobe.sampling.sampled import SampledRows
    from logprobe.transport.messages import Request


class Drawing:
    """Runs the processors and the sampler on rows of logits."""

    def __init__(self, processing: Processing, sampler: Sampler) -> None:
        self._processing = processing
        self._sampler = sampler

    def draw(self, chunk: list[Draw], logits: Tensor) -> SampledRows:
        """A token for each row of (rows, V) float32 logits, which stay raw; see `Processing.chunks`."""
        params = [draw.sample.request.params for draw in chunk]
        uniforms = np.array([draw.sample.uniform(draw.ahead) for draw in chunk])
        changed = self._processing.apply(chunk, logits)
        forced = [draw.sample.forced_token_id(draw.ahead) for draw in chunk]
        output = self._sampler.draw(
            logits, params, uniforms, None if changed is None else changed.logits, forced
        )
        if any(one.explain for one in params):
            output = output.to_host()  # an explanation names the tokens that the rows list
        self._processing.record(chunk, logits, changed, output)
        output.whole_rows.update(_whole_rows(chunk, logits))
        return output


def new_generator(request: Request, number: int, index: int, seed: int) -> np.random.Generator:
    """What draws one sample of an engine's `number`-th request; `seed` is the engine's own.

    Streams of different (seed, sample) never coincide, nor do those with and without a seed.
    """
    own = request.params.seed
    base = seed if own is None else own
    kind = 2 * (own is None) + (base < 0)
    return np.random.default_rng([index, kind, number if own is None else 0, abs(base)])


def _whole_rows(draws: list[Draw], logits: Tensor) -> dict[int, Array]:
    """The log-softmax of the rows whose requests want it; each array is its own, not a view of the batch."""
    rows = [row for row, draw in enumerate(draws) if draw.sample.request.wants_row]
    if not rows:
        return {}
    # Our own log-normaliser: torch's float32 log_softmax is off by 1e-5 on wide vocabularies.
    lse = extract(logits[rows], [0] * len(rows), 0).lse
    (table,) = on_host([logits[rows] - lse[:, None]])
    whole = {}
    for row, values in zip(rows, table, strict=True):
        whole[row] = values.copy()
        whole[row].flags.writeable = False
    return whole
