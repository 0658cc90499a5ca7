"""Engine requests that score continuations, and the numbers of their outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from logprobe.analysis.measures import total
from logprobe.errors import require
from logprobe.records.values import IdLists
from logprobe.sampling.params import SamplingParams, extras_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.engine.request import RequestOutput, Requests
    from logprobe.records import FlatLogprobs
    from logprobe.text.boundary import Split
    from logprobe.transport.messages import Admitted


def admit_splits(
    splits: Sequence[Split],
    params: SamplingParams,
    requests: Requests,
    request_ids: Sequence[str] | None = None,
    *,
    sampling: SamplingParams | None = None,
) -> list[Admitted]:
    """Admit a request for each split that scores its continuation; errors as `Requests.admit`.

    Args:
        splits: the continuations after their contexts.
        params: the numbers to report.
        requests: makes the requests.
        request_ids: of the requests; None: new ones.
        sampling: score under the distribution that these would draw from; None: the model's own.
    """
    names: Sequence[str | None] = request_ids or [None] * len(splits)
    named = zip(splits, names, strict=True)
    if sampling is not None:
        return [_admit_forced(requests, split, sampling, params, name) for split, name in named]
    return [
        requests.admit(
            split.token_ids, _named_after(params, split.start), first_scored=split.start, request_id=name
        )
        for split, name in named
    ]


def _admit_forced(
    requests: Requests,
    split: Split,
    sampling: SamplingParams,
    reports: SamplingParams,
    request_id: str | None,
) -> Admitted:
    """All positions at once; one after another where processors look at what came before."""
    forced = split.continuation
    asked = _forced_params(sampling, len(forced), reports)
    admitted = requests.admit(split.context, asked, forced_token_ids=forced, request_id=request_id)
    if admitted.processor_args:
        return admitted
    at_once = _named_after(
        replace(asked, max_tokens=0, min_tokens=0, prompt_logprobs=asked.logprobs), split.start
    )
    return requests.admit(
        split.token_ids, at_once, first_scored=split.start, scored_as=at_once, request_id=request_id
    )


def _forced_params(params: SamplingParams, num_tokens: int, reports: SamplingParams) -> SamplingParams:
    """What gives the numbers of `num_tokens` given tokens under the distribution that `params` draw from.

    How many numbers, of which ids, and which further columns, is what `reports` ask of a prompt; ids position
    by position are those of the given tokens.
    """
    return replace(
        params,
        logprob_token_ids=reports.logprob_token_ids or params.logprob_token_ids,
        n=1,
        best_of=None,
        max_tokens=num_tokens,
        min_tokens=min(params.min_tokens, num_tokens),
        logprobs=reports.prompt_logprobs or 0,
        prompt_logprobs=None,
        logprobs_mode="processed_logprobs",
        explain=False,
        **extras_of(reports),
    )


def at_temperature(temperature: float) -> SamplingParams:
    """What draws from a model's own distribution at a temperature.

    Raises:
        ParameterError: it is not positive.
    """
    params = SamplingParams(temperature=temperature)
    remedy = "must be positive: at 0 every token but the likeliest is impossible"
    require(not params.is_greedy, "temperature", remedy, got=temperature)
    return params


def _named_after(params: SamplingParams, start: int) -> SamplingParams:
    """The same of a prompt whose positions from `start` on are those that the ids are named of."""
    ids = params.logprob_token_ids
    return replace(params, logprob_token_ids=ids.after(start)) if isinstance(ids, IdLists) else params


def scored(output: RequestOutput) -> FlatLogprobs:
    """The record of what was scored: of a prompt, or of tokens taken in place of draws."""
    record = output.prompt_logprobs
    record = output.outputs[0].logprobs if record is None else record
    assert record is not None, "numbers were asked for"
    return record


def scored_total(output: RequestOutput, healed: float | None = None) -> float:
    """The log-probability of what was scored, nats: over its bytes, or the sum over its tokens.

    A prompt's first position, which nothing predicts, is left out.
    """
    if healed is not None:
        return healed
    return total(np.ma.compressed(scored(output).chosen_entries().logprobs))
