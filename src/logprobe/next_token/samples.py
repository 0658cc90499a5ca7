"""What a sampled sequence needs beside the engine: seeds of repeats, and the ids without the stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logprobe.errors import RequestAbortedError

if TYPE_CHECKING:
    from logprobe.engine.request import RequestOutput


def nth_seed(seed: int, repeat: int) -> int:
    """A seed of its own for each repetition; the first is the seed itself."""
    if repeat == 0:
        return seed
    words = np.random.SeedSequence([abs(seed), int(seed < 0), repeat]).generate_state(2, np.uint64)
    return int(words[0]) << 64 | int(words[1])


def sampled_ids(output: RequestOutput) -> list[int]:
    """The ids that were drawn, without the stop id that ended them.

    Raises:
        EngineError: the request failed or was given up.
    """
    if output.error is not None:
        raise output.error
    completion = output.outputs[0]
    if completion.finish_reason == "abort":
        raise RequestAbortedError("the engine gave the sample up")
    is_stopped = completion.finish_reason == "stop"
    return completion.token_ids[:-1] if is_stopped else completion.token_ids
