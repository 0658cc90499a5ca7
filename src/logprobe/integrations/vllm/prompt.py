"""Convert vLLM's flat prompt log-probabilities to this library's rows.

vLLM's `RequestOutput.prompt_logprobs` has raw log-probabilities, k per position or the whole vocabulary.
Caller-specified ids, extra columns and processed distributions are computed from whole rows, because vLLM
does not compute true ranks for specified ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.errors import EngineError, NonFiniteLogitsError, ParameterError
from logprobe.kernels import extract
from logprobe.kernels.extraction.head import default_chunk_rows
from logprobe.records.rows import HostRows
from logprobe.sampling import Sampler
from logprobe.sampling.params import extras_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.store.columns import Array
    from logprobe.sampling.params import NamedIds
    from logprobe.transport.messages import Request

MAX_ENTRIES: Final = 1 << 25  # vLLM uses about 70 bytes per entry


def asked_of_vllm(request: Request) -> int | None:
    """Return the `prompt_logprobs` to pass to vLLM: the request's value, or -1 if whole rows are needed."""
    params = request.params
    if params.prompt_logprobs is None:
        return None
    return -1 if _needs_rows(request) else params.prompt_logprobs


def check_prompt(request: Request, vocab_size: int) -> None:
    """Raise `ParameterError` if a prompt needs more whole rows than vLLM can return."""
    if asked_of_vllm(request) != -1:
        return
    limit = MAX_ENTRIES // vocab_size
    if len(request.prompt_token_ids) > limit:
        name = "logprob_token_ids" if request.params.logprob_token_ids else "prompt_logprobs"
        raise ParameterError(
            name,
            f"needs whole rows of {len(request.prompt_token_ids)} prompt tokens, but the vLLM engine "
            f"returns at most {limit} of them; score the prompt in windows, or use engine='native'",
        )


def prompt_rows(flat: Any, request: Request, vocab_size: int) -> HostRows:
    """Return the rows for the prompt positions from `request.first_scored` on.

    Raises:
        EngineError: vLLM returned the log-probabilities of another prompt.
        NonFiniteLogitsError: a row has NaN.
    """
    ids, width = request.prompt_token_ids, _width(request, vocab_size)
    num_rows = len(ids) - 1
    token_ids = np.array(flat.token_ids, dtype=np.int32)
    if token_ids.size != num_rows * width or not np.array_equal(token_ids[::width], ids[1:]):
        raise EngineError(f"vLLM returned the prompt logprobs of another prompt for {request.request_id!r}")
    own = slice(request.first_scored - 1, None)
    table = token_ids.reshape(num_rows, width)[own]
    logprobs = np.array(flat.logprobs, dtype=np.float32).reshape(num_rows, width)[own]
    if np.isnan(logprobs).any():
        position = request.first_scored + int(np.isnan(logprobs).any(axis=1).argmax())
        raise NonFiniteLogitsError(
            f"the model returned NaN or +inf, or only -inf, at prompt position {position} of request "
            f"{request.request_id!r}; check the weights and the dtype"
        )
    if asked_of_vllm(request) == -1:
        return _from_whole_rows(table, logprobs, request, vocab_size)
    ranks = np.array(flat.ranks, dtype=np.int32).reshape(num_rows, width)[own, 0]
    return _narrow(table, logprobs, ranks)


def _needs_rows(request: Request) -> bool:
    params = request.params
    is_whole = params.prompt_logprobs == -1 or bool(params.logprob_token_ids)
    return is_whole or any(extras_of(params).values()) or request.scored_as is not None


def _width(request: Request, vocab_size: int) -> int:
    asked = asked_of_vllm(request)
    return 1 + (vocab_size if asked == -1 else min(asked or 0, vocab_size))


def _narrow(token_ids: Array, logprobs: Array, ranks: Array) -> HostRows:
    """Sort vLLM's rows so that ties are ordered by ascending id and the chosen token gets the best rank."""
    order = np.lexsort((token_ids[:, 1:], -logprobs[:, 1:]), axis=1) + 1
    best = np.take_along_axis(logprobs, order, axis=1)
    chosen = logprobs[:, :1]
    # If the chosen token is among the alternatives, so are all tokens with greater values.
    is_listed = (best <= chosen).any(axis=1)
    ranks = np.where(is_listed, 1 + (best > chosen).sum(axis=1), ranks).astype(np.int32)
    return HostRows(
        np.hstack([token_ids[:, :1], np.take_along_axis(token_ids, order, axis=1)]),
        np.hstack([chosen, best]),
        ranks,
    )


def _from_whole_rows(token_ids: Array, logprobs: Array, request: Request, vocab_size: int) -> HostRows:
    """Compute the requested values from rows of the whole vocabulary in descending order."""
    params, size = request.params, default_chunk_rows(vocab_size)
    parts = []
    for start in range(0, len(token_ids), size):
        own = slice(start, start + size)
        dense = np.full((len(token_ids[own]), vocab_size), -np.inf, np.float32)
        np.put_along_axis(dense, token_ids[own, 1:], logprobs[own, 1:], axis=1)
        first = request.first_scored + start
        named = [params.named_ids_at(position) for position in range(first, first + len(dense))]
        parts.append(_extracted(dense, token_ids[own, 0], request, named))
    return HostRows.joined(parts)


def _extracted(dense: Array, chosen: Array, request: Request, named: Sequence[NamedIds]) -> HostRows:
    count, params = len(dense), request.params
    if request.scored_as is not None:
        asked, forced = [request.scored_as] * count, chosen.tolist()
        output = Sampler().sample(dense, asked, np.zeros(count), None, forced, named)
        assert output.processed_logprobs is not None
        return output.processed_logprobs
    assert params.prompt_logprobs is not None
    return extract(
        dense,
        chosen,
        params.prompt_logprobs,
        given_ids=None if all(ids is None for ids in named) else named,
        **extras_of(params),
    ).to_host()
