"""Handles prompts longer than the model's context: keep their end, or score them in sliding windows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from logprobe.errors import ParameterError, require
from logprobe.records import FlatLogprobs
from logprobe.sampling.params import extras_of
from logprobe.text.windows import last_of_split, window_pairs, window_splits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.engine.request import RequestOutput
    from logprobe.records.values import IntArray
    from logprobe.sampling.params import SamplingParams
    from logprobe.text.boundary import Split

Truncation: TypeAlias = Literal["error", "left", "window"]
"""Handling of a text longer than the context: reject it, keep its end, or score it in sliding windows."""
TRUNCATIONS = ("error", "left", "window")


def check_truncation(truncation: Truncation) -> None:
    """Raise `ParameterError` unless the value is one of `TRUNCATIONS`."""
    known = f"must be one of {', '.join(TRUNCATIONS)}, got {truncation!r}"
    require(truncation in TRUNCATIONS, "truncation", known)


def cut_pair(split: Split, truncation: Truncation, max_model_len: int) -> list[Split]:
    """Return pairs of context and continuation that fit the model, as `truncation` says.

    With `left` this is one pair whose context is cut at the front; with `window`, one pair per window. A pair
    that fits, and any pair with `error`, is returned as it is.

    Raises:
        ParameterError: with `left`, the continuation alone is too long.
    """
    limit = max_model_len + 1  # the last token is never run
    if len(split.token_ids) <= limit or truncation == "error":
        return [split]
    if truncation == "left":
        try:
            return [last_of_split(split, limit)]
        except ParameterError as error:
            raise ParameterError("continuation", str(error).removeprefix("text: ")) from error
    return window_splits(split, limit)


def cut_prompt(
    ids: IntArray, params: SamplingParams, truncation: Truncation, max_model_len: int
) -> list[tuple[IntArray, SamplingParams, int]]:
    """Split a prompt into requests that fit the model.

    The first request generates completions, from the end of the prompt if the prompt is too long. With
    `window` and `prompt_logprobs`, one request per window follows, to score the prompt.

    Returns:
        For each request: token ids, parameters, and the index of the first token to score.
    """
    # A prompt that is only scored may be one token longer: its last token is never run.
    room = max_model_len - params.max_tokens if params.max_tokens else max_model_len + 1
    if truncation == "error" or len(ids) <= room:
        return [(ids, params, 1)]
    remedy = "with one list per position needs a prompt that fits; shorten it, or score windows separately"
    require(not (params.names_positions and params.prompt_logprobs is not None), "logprob_token_ids", remedy)
    if truncation == "window":
        remedy = "needs a prompt that fits, because windows have other activations; use truncation='left'"
        require(params.return_hidden_states is None, "return_hidden_states", remedy)
        require(not params.return_routed_experts, "return_routed_experts", remedy)
    remedy = "cannot be combined with a prompt that is cut; cut the prompt and its routes yourself"
    require(params.routed_experts is None, "routed_experts", remedy)
    end = ids[-max(room, 1) :]
    if truncation == "left" or params.prompt_logprobs is None:
        return [(end, params, 1)]
    has_rows = params.logprobs is not None
    generating = replace(
        params,
        prompt_logprobs=None,
        logprob_token_ids=params.logprob_token_ids if has_rows else None,
        **(extras_of(params) if has_rows else extras_of()),
    )
    scoring = replace(
        params, max_tokens=0, min_tokens=0, n=1, best_of=None, logprobs=None, explain=False, digest=False
    )
    pairs = window_pairs(ids, 1, max_model_len + 1)
    return [
        (end, generating, 1),
        *((np.concatenate(pair), scoring, len(pair[0])) for pair in pairs),
    ]


def joined_output(output: RequestOutput, windows: Sequence[RequestOutput], ids: IntArray) -> RequestOutput:
    """Add the whole prompt's ids, and its log-probabilities from all windows, to the generating output.

    If a window failed, every completion fails with the window's error.
    """
    output.prompt_token_ids = ids.tolist()
    failed = next((window.error for window in windows if window.error is not None), None)
    if failed is not None:
        for completion in output.outputs:
            completion.error, completion.finish_reason = failed, "error"
        return output
    records = [window.prompt_logprobs for window in windows]
    assert records[0] is not None
    joined = FlatLogprobs(table=records[0].table, info=records[0].info)
    for record in records:
        assert record is not None
        joined.extend(record)
    output.prompt_logprobs = joined
    output.info = output.info or windows[0].info
    return output
