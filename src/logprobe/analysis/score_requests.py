"""Engine requests that score continuations, and how to read their outputs."""

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
    """Admit one request per split, which scores the split's continuation.

    Raises the errors of `Requests.admit`.

    Args:
        splits: contexts with their continuations.
        params: the logprobs and extra columns to report.
        requests: admits the requests.
        request_ids: one id per split; None creates new ids.
        sampling: score under the distribution that these parameters would sample from; None scores under the
            model's own distribution.
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
    """Admit a request that scores under `sampling`: in one pass or, with processors, token by token."""
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
    """Return parameters that score `num_tokens` forced tokens under the sampling distribution of `params`.

    `reports` sets the number of logprobs, the token ids and the extra columns, as it would for a prompt.
    Token ids that differ per position refer to the forced tokens.
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
        digest=False,
        **extras_of(reports),
    )


def at_temperature(temperature: float) -> SamplingParams:
    """Return parameters that sample from the model's distribution at `temperature`.

    Raises:
        ParameterError: the temperature is not positive.
    """
    params = SamplingParams(temperature=temperature)
    remedy = "must be positive: at 0, all tokens except the most likely one are impossible"
    require(not params.is_greedy, "temperature", remedy, got=temperature)
    return params


def _named_after(params: SamplingParams, start: int) -> SamplingParams:
    """Shift per-position lists of token ids so that the first list applies to prompt position `start`."""
    ids = params.logprob_token_ids
    return replace(params, logprob_token_ids=ids.after(start)) if isinstance(ids, IdLists) else params


def scored(output: RequestOutput) -> FlatLogprobs:
    """Return the record of the scored tokens, whether they were part of the prompt or forced."""
    record = output.prompt_logprobs
    record = output.outputs[0].logprobs if record is None else record
    assert record is not None, "logprobs were requested"
    return record


def scored_total(output: RequestOutput, healed: float | None = None) -> float:
    """Return the log-probability of the continuation, in nats.

    This is `healed` if given, otherwise the sum over the continuation's tokens. The first position of a
    prompt has no log-probability and is skipped.
    """
    if healed is not None:
        return healed
    return total(np.ma.compressed(scored(output).chosen_entries().logprobs))
