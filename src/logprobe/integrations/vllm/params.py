"""vLLM's sampling parameters for a sample: greedy, because the worker leaves one possible token per row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.integrations.vllm.orders import BEFORE, TAG, WORK
from logprobe.integrations.vllm.prompt import asked_of_vllm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.store.columns import Array
    from logprobe.transport.messages import Request


def scoring_params(request: Request) -> Any:
    """Return parameters to score a prompt only; vLLM must generate one token, which is dropped."""
    return _params(max_tokens=1, prompt_logprobs=asked_of_vllm(request))


def drawing_params(
    request: Request, tag: str, work: bytes, num_before: int, *, end_ids: Sequence[int], is_first: bool
) -> Any:
    """Return parameters to generate a sample, of which `num_before` tokens are in the prompt already."""
    params = request.params
    stops = [] if request.forced_token_ids is not None else [*params.stop_token_ids]
    if request.forced_token_ids is None and not params.ignore_eos:
        stops += end_ids
    return _params(
        max_tokens=max(params.max_tokens - num_before, 1),
        stop_token_ids=stops,
        prompt_logprobs=asked_of_vllm(request) if is_first else None,
        extra_args={TAG: tag, WORK: work, BEFORE: num_before},
    )


def portable_params() -> Any:
    """Return parameters that make vLLM return a whole row: slow, but independent of our worker code."""
    return _params(max_tokens=1, logprobs=-1)


def portable_row(output: Any, vocab_size: int) -> Array:
    """Return the row in an output for `portable_params`, (V,) float32, nats, read-only."""
    flat = output.outputs[0].logprobs
    row = np.full(vocab_size, -np.inf, np.float32)
    row[np.asarray(flat.token_ids)] = np.asarray(flat.logprobs, np.float32)
    row.flags.writeable = False
    return row


def _params(**asked: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        ignore_eos=True,  # the end tokens are in stop_token_ids
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
        **asked,
    )
