"""`Sampler`: rows of logits → chosen tokens and the numbers that were asked about them.

Before it: the output head, one chunk of rows at a time. After it: the step's records.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from logprobe.kernels.draw.api import draw, truncated_
from logprobe.kernels.draw.params import Drawn, DrawParams
from logprobe.kernels.extraction.api import check_requests, extract_checked
from logprobe.records.rows import DeviceRows, HostRows
from logprobe.sampling.kept import kept_ids, log_kept_mass
from logprobe.sampling.params import extras_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from logprobe.kernels.draw.params import FloatArray
    from logprobe.records.rows import Send
    from logprobe.records.store.columns import Array
    from logprobe.sampling.params import NamedIds, SamplingParams


LARGEST_K = 1 << 24  # the numbers up to it are exact in float32; no vocabulary is larger


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledRows:
    """Tokens sampled from B rows; `logprobs_rows` and `processed_rows` say which rows' numbers there are."""

    sampled_token_ids: list[int]  # (B,)
    is_valid: list[bool]  # (B,); False: the logits held NaN or +inf, or nothing but -inf
    num_logprobs: list[int]  # (B,), the alternatives that each row asked for; 0 where it asked for none
    # Raw; None: not asked for. Where they are on their way to the host: what waits for them.
    logprobs: DeviceRows | HostRows | Callable[[], HostRows] | None = None
    logprobs_rows: list[int]  # (B,), the row of `logprobs`; -1: none
    processed_logprobs: HostRows | None = None  # of what the tokens were drawn from
    processed_rows: list[int]  # (B,), the row of `processed_logprobs`; -1: none
    whole_rows: dict[int, Array] = field(default_factory=dict)  # row → its distribution, (V,) nats, read-only

    @property
    def has_rows(self) -> bool:
        """Whether numbers of any row were asked for."""
        return self.logprobs is not None or self.processed_logprobs is not None

    def to_host(self) -> SampledRows:
        """The same with the raw numbers on the host."""
        raw = self.logprobs
        return replace(self, logprobs=raw.to_host()) if isinstance(raw, DeviceRows) else self

    def sent(self, send: Send | None) -> SampledRows:
        """The same, whose raw numbers are sent to the host now where they can be; `cut` waits for them."""
        raw = self.logprobs
        if not isinstance(raw, DeviceRows):
            return self
        return replace(self, logprobs=cache(raw.to_host if send is None else raw.arriving(send)))

    def arrive(self) -> None:
        """Wait until the raw numbers are on the host."""
        if callable(self.logprobs):
            self.logprobs()

    def cut(self, row: int, count: int) -> tuple[HostRows | None, HostRows | None]:
        """Raw and processed numbers of rows [row, row + count), which asked for the same; None: for none.

        Waits until the raw ones are on the host.
        """
        assert not isinstance(self.logprobs, DeviceRows), "they were sent"
        raw = self.logprobs() if callable(self.logprobs) else self.logprobs
        k = self.num_logprobs[row]
        return (
            _cut(raw, self.logprobs_rows[row], count, k),
            _cut(self.processed_logprobs, self.processed_rows[row], count, k),
        )


class Sampler:
    """Draws a token for each row and reports log-probabilities.

    In this order, of which the processors' pipeline does 2 to 5, for the rows that have any:

    1. the logits as the model gave them are kept as *raw*;
    2. masks: allowed tokens, banned words, least length, grammar;
    3. bias on single tokens;
    4. the registered processors, in the order of declaration;
    5. penalties on tokens seen already;
    6. temperature: logits / temperature (0: the most likely token, no draw, and steps 7-9 are skipped);
    7. top-k: the k largest, ties by ascending id;
    8. top-p: of these, the smallest set of largest with at least that share of their mass;
    9. min-p: of these, those at least min-p times as likely as the most likely;
    10. what is left, renormalised, is *processed*;
    11. the draw: one uniform number of the request's own generator picks the token.
    """

    def __init__(self) -> None:
        self._settings = _BatchSettings((), 0)

    def sample(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        uniforms: NDArray[np.float64],
        changed: Tensor | None = None,
        forced: Sequence[int | None] = (),
        named: Sequence[NamedIds] | None = None,
    ) -> SampledRows:
        """Draw from (B, V) float32 logits; `uniforms` is (B,) in [0, 1).

        `changed`, (R, V), is what the processors made of the first R rows; `logits` stays raw. `forced` names
        the token of a row whose draw does not count, `named` the ids that each row reports where they are not
        those of its parameters.
        """
        return self.draw(logits, params, uniforms, changed, forced, named).to_host()

    def draw(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        uniforms: NDArray[np.float64],
        changed: Tensor | None = None,
        forced: Sequence[int | None] = (),
        named: Sequence[NamedIds] | None = None,
    ) -> SampledRows:
        """`sample`, of which the raw log-probabilities stay where the logits are."""
        settings = self._settings
        if named is not None:  # of this step alone
            settings = _BatchSettings(params, logits.shape[1], named)
        elif not settings.is_of(params, logits.shape[1]):
            settings = self._settings = _BatchSettings(params, logits.shape[1])
        drawn = _draw(logits, changed, DrawParams(*settings.columns, uniforms))
        for row, token_id in enumerate(forced):
            if token_id is not None:
                drawn.token_ids[row] = token_id
        raw = None if settings.raw is None else settings.raw.of(logits, drawn)
        processed = None
        if settings.processed is not None:
            processed = _processed(logits, changed, drawn, settings.processed, settings.columns[0])
        return SampledRows(
            sampled_token_ids=drawn.token_ids.tolist(),
            is_valid=drawn.is_valid.tolist(),
            num_logprobs=settings.num_logprobs,
            logprobs=raw,
            logprobs_rows=settings.raw_indices,
            processed_logprobs=processed,
            processed_rows=settings.processed_indices,
        )


class _BatchSettings:
    """The parameters of a batch by column, made once for as long as its rows are the same requests."""

    def __init__(
        self, params: Sequence[SamplingParams], vocab_size: int, named: Sequence[NamedIds] | None = None
    ) -> None:
        self._params, self._vocab_size = list(params), vocab_size
        ids = [request.named_ids_at(0) for request in params] if named is None else named
        self.columns = _columns(params)  # of `DrawParams`, all but the uniform numbers
        counts = [request.logprobs or 0 for request in params]
        self.num_logprobs = [vocab_size if k < 0 else min(k, vocab_size) for k in counts]
        raw_rows = [row for row, request in enumerate(params) if _wants_raw(request)]
        processed_rows = [row for row, request in enumerate(params) if _wants_processed(request)]
        self.raw = _Report(raw_rows, params, vocab_size, ids) if raw_rows else None
        self.processed = _Report(processed_rows, params, vocab_size, ids) if processed_rows else None
        self.raw_indices = _indices(raw_rows, len(params))
        self.processed_indices = _indices(processed_rows, len(params))

    def is_of(self, params: Sequence[SamplingParams], vocab_size: int) -> bool:
        """Whether these are the same requests, over as many tokens."""
        is_as_long = len(params) == len(self._params) and vocab_size == self._vocab_size
        return is_as_long and all(map(operator.is_, params, self._params))


class _Report:
    """The numbers that some of a step's rows are asked for."""

    def __init__(
        self,
        rows: list[int],
        params: Sequence[SamplingParams],
        vocab_size: int,
        named: Sequence[NamedIds],
    ) -> None:
        self.rows = rows
        self.is_whole = len(rows) == len(params)  # most steps report every row or none: no copy then
        self.params = reported = [params[row] for row in rows]
        given_ids = [named[row] for row in rows]
        self._requests = check_requests(
            (len(rows), vocab_size),
            np.zeros(len(rows), np.int32),
            np.array([request.logprobs or 0 for request in reported]),
            given_ids=None if all(ids is None for ids in given_ids) else given_ids,
            **extras_of(*reported),
        )

    def of(self, logits: Tensor, drawn: Drawn) -> DeviceRows:
        """The rows' numbers, from the logits of all the step's rows."""
        return self.of_own(logits if self.is_whole else logits[self.rows], drawn)

    def of_own(self, logits: Tensor, drawn: Drawn) -> DeviceRows:
        """The rows' numbers, from the logits of these rows alone."""
        chosen = drawn.token_ids if self.is_whole else drawn.token_ids[self.rows]
        return extract_checked(logits, self._requests.of_tokens(torch.from_numpy(chosen)))


def _processed(
    logits: Tensor,
    changed: Tensor | None,
    drawn: Drawn,
    report: _Report,
    temperatures: FloatArray,
) -> HostRows:
    """The numbers of the distribution that the tokens were drawn from."""
    part = truncated_(_copied(logits, changed, report.rows), drawn, report.rows, temperatures)
    rows = np.array(report.rows)
    num_changed = 0 if changed is None else len(changed)
    is_touched = (drawn.cut_logits[rows] > -np.inf) | (rows < num_changed)
    mass = log_kept_mass(logits[report.rows], part, temperatures[rows], is_touched)
    asks = np.array([request.kept_ids for request in report.params])
    reported = report.of_own(part, drawn).to_host()
    return HostRows(
        reported.token_ids,
        reported.logprobs,
        reported.ranks,
        {**reported.extras, "log_kept_mass": mass},
        reported.given,
        kept_ids(part, asks) if asks.any() else None,
    )


def _indices(rows: list[int], num_rows: int) -> list[int]:
    """For each row its index in `rows`, -1 where it is not one of them."""
    indices = [-1] * num_rows
    for index, row in enumerate(rows):
        indices[row] = index
    return indices


def _wants_raw(params: SamplingParams) -> bool:
    is_asked = params.logprobs is not None and params.logprobs_mode != "processed_logprobs"
    return is_asked or params.picks_best


def _wants_processed(params: SamplingParams) -> bool:
    return params.logprobs is not None and params.logprobs_mode != "raw_logprobs"


def _draw(logits: Tensor, changed: Tensor | None, settings: DrawParams) -> Drawn:
    if changed is None:
        return draw(logits, settings)
    first, rest = slice(0, len(changed)), slice(len(changed), None)
    drawn = Drawn.empty(len(logits))
    drawn.put(first, draw(changed, settings.rows(first)))
    if len(changed) < len(logits):
        drawn.put(rest, draw(logits[rest], settings.rows(rest)))
    return drawn


def _copied(logits: Tensor, changed: Tensor | None, rows: list[int]) -> Tensor:
    """Copies of some rows, of the changed logits where there are any."""
    num_changed = 0 if changed is None else len(changed)
    parts = [logits[[row for row in rows if row >= num_changed]]]
    if changed is not None:
        parts.insert(0, changed[[row for row in rows if row < num_changed]])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _columns(params: Sequence[SamplingParams]) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    columns = np.array(
        [
            (request.temperature, min(max(request.top_k, 0), LARGEST_K), request.top_p, request.min_p)
            for request in params
        ],
        dtype=np.float32,
    ).reshape(-1, 4)
    temperatures, top_ks, top_ps, min_ps = np.ascontiguousarray(columns.T)
    return temperatures, top_ks, top_ps, min_ps


def _cut(rows: HostRows | None, first: int, count: int, k: int) -> HostRows | None:
    """Rows that lie together from `first` on, with `k` alternatives each; none below 0."""
    return None if rows is None or first < 0 else rows.rows(first, first + count).narrowed(k)
