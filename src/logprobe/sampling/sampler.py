"""`Sampler`: samples tokens from rows of logits and computes the requested log-probabilities.

The engine calls it once per chunk of rows from the output head.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels.draw.api import draw, truncated_
from logprobe.kernels.draw.params import Drawn, DrawParams
from logprobe.kernels.extraction.api import extract_checked
from logprobe.kernels.extraction.requests import check_requests
from logprobe.kernels.placement import as_rows
from logprobe.records.rows import DeviceRows, HostRows
from logprobe.sampling.kept import kept_ids, log_kept_mass
from logprobe.sampling.params import extras_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from logprobe.kernels.draw.params import FloatArray
    from logprobe.kernels.placement import Rows
    from logprobe.records.rows import Send
    from logprobe.records.store.columns import Array
    from logprobe.sampling.params import NamedIds, SamplingParams


LARGEST_K = 1 << 24  # largest range of integers exact in float32; no vocabulary is larger


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledRows:
    """Tokens sampled from B rows of logits, and log-probabilities for the rows that requested them."""

    sampled_token_ids: list[int]  # (B,)
    is_valid: list[bool]  # (B,); False: the logits held NaN or +inf, or only -inf
    num_logprobs: list[int]  # (B,), requested number of alternatives; 0 if none
    # Raw log-probabilities; None: not requested. During the copy to the host, this is a function that waits
    # for the copy and returns the rows.
    logprobs: DeviceRows | HostRows | Callable[[], HostRows] | None = None
    logprobs_rows: list[int]  # (B,), index into `logprobs`; -1: not requested
    processed_logprobs: HostRows | None = None  # log-probabilities under the distributions sampled from
    processed_rows: list[int]  # (B,), index into `processed_logprobs`; -1: not requested
    whole_rows: dict[int, Array] = field(default_factory=dict)  # row → (V,) log-probabilities, nats

    @property
    def has_rows(self) -> bool:
        """True if any row requested log-probabilities."""
        return self.logprobs is not None or self.processed_logprobs is not None

    def to_host(self) -> SampledRows:
        """Return a copy whose raw log-probabilities are on the host."""
        raw = self.logprobs
        return replace(self, logprobs=raw.to_host()) if isinstance(raw, DeviceRows) else self

    def sent(self, send: Send | None) -> SampledRows:
        """Start copying the raw log-probabilities to the host with `send`.

        Returns an object whose `cut` and `arrive` wait for the copy, or make it themselves if `send` is None.
        """
        raw = self.logprobs
        if not isinstance(raw, DeviceRows):
            return self
        return replace(self, logprobs=cache(raw.to_host if send is None else raw.arriving(send)))

    def arrive(self) -> None:
        """Wait until the raw log-probabilities are on the host."""
        if callable(self.logprobs):
            self.logprobs()

    def cut(self, row: int, count: int) -> tuple[HostRows | None, HostRows | None]:
        """Return the raw and the processed rows [row, row + count), each None if not requested.

        All of these rows must have the same parameters. Waits until the raw rows are on the host.
        """
        assert not isinstance(self.logprobs, DeviceRows), "call sent() first"
        raw = self.logprobs() if callable(self.logprobs) else self.logprobs
        k = self.num_logprobs[row]
        return (
            _cut(raw, self.logprobs_rows[row], count, k),
            _cut(self.processed_logprobs, self.processed_rows[row], count, k),
        )


class Sampler:
    """Samples one token per row and computes the requested log-probabilities.

    Order of operations; the processor pipeline does steps 2 to 5 for the rows that need them:

    1. keep the model's logits as *raw*;
    2. masks: allowed tokens, banned words, minimum length, grammar;
    3. bias on single tokens;
    4. registered processors, in the order of declaration;
    5. penalties on tokens that have already occurred;
    6. temperature: logits / temperature (0: the most likely token, without sampling or steps 7-9);
    7. top-k: the k largest, ties by ascending id;
    8. top-p: of these, the smallest set of most likely tokens whose normalized probabilities sum to at least
       top-p;
    9. min-p: of these, the tokens at least min-p times as likely as the most likely one;
    10. the remaining tokens, renormalized, form the *processed* distribution;
    11. one uniform number from the request's own generator picks the token.
    """

    def __init__(self) -> None:
        self._settings = _BatchSettings((), 0)

    def sample(
        self,
        logits: Rows,
        params: Sequence[SamplingParams],
        uniforms: NDArray[np.float64],
        changed: Rows | None = None,
        forced: Sequence[int | None] = (),
        named: Sequence[NamedIds] | None = None,
    ) -> SampledRows:
        """Sample one token per row.

        Args:
            logits: (B, V) float32 logits of the model; an array, or a tensor.
            params: parameters of each row.
            uniforms: (B,) random numbers in [0, 1), one for each row.
            changed: (R, V) logits of the first R rows after the processors; None: no processors ran.
            forced: token id per row that replaces the sampled one; None: keep the sampled one.
            named: token ids to report per row; None: the ids in `params`.
        """
        return self.draw(logits, params, uniforms, changed, forced, named).to_host()

    def draw(
        self,
        logits: Rows,
        params: Sequence[SamplingParams],
        uniforms: NDArray[np.float64],
        changed: Rows | None = None,
        forced: Sequence[int | None] = (),
        named: Sequence[NamedIds] | None = None,
    ) -> SampledRows:
        """Do the same as `sample`, but leave the raw log-probabilities on the device of the logits."""
        logits, changed = as_rows(logits), None if changed is None else as_rows(changed)
        settings = self._settings
        if named is not None:  # ids of this step only: not reusable
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
    """The parameters of a batch as arrays; reused while the batch has the same requests."""

    def __init__(
        self, params: Sequence[SamplingParams], vocab_size: int, named: Sequence[NamedIds] | None = None
    ) -> None:
        self._params, self._vocab_size = list(params), vocab_size
        ids = [request.named_ids_at(0) for request in params] if named is None else named
        self.columns = _columns(params)  # arguments of `DrawParams`, without the uniform numbers
        counts = [request.logprobs or 0 for request in params]
        self.num_logprobs = [vocab_size if k < 0 else min(k, vocab_size) for k in counts]
        raw_rows = [row for row, request in enumerate(params) if _wants_raw(request)]
        processed_rows = [row for row, request in enumerate(params) if _wants_processed(request)]
        self.raw = _Report(raw_rows, params, vocab_size, ids) if raw_rows else None
        self.processed = _Report(processed_rows, params, vocab_size, ids) if processed_rows else None
        self.raw_indices = _indices(raw_rows, len(params))
        self.processed_indices = _indices(processed_rows, len(params))

    def is_of(self, params: Sequence[SamplingParams], vocab_size: int) -> bool:
        """Return True if this object was made from these very parameter objects and vocabulary size."""
        is_as_long = len(params) == len(self._params) and vocab_size == self._vocab_size
        return is_as_long and all(map(operator.is_, params, self._params))


class _Report:
    """Computes log-probabilities, raw or processed, for the rows of a batch that requested them."""

    def __init__(
        self,
        rows: list[int],
        params: Sequence[SamplingParams],
        vocab_size: int,
        named: Sequence[NamedIds],
    ) -> None:
        self.rows = rows
        self.is_whole = len(rows) == len(params)  # the usual case; needs no copy
        self.params = reported = [params[row] for row in rows]
        given_ids = [named[row] for row in rows]
        self._requests = check_requests(
            (len(rows), vocab_size),
            np.zeros(len(rows), np.int32),
            np.array([request.logprobs or 0 for request in reported]),
            given_ids=None if all(ids is None for ids in given_ids) else given_ids,
            **extras_of(*reported),
        )

    def of(self, logits: Rows, drawn: Drawn) -> DeviceRows:
        """Compute the log-probabilities from the logits of all rows of the batch."""
        return self.of_own(logits if self.is_whole else logits[self.rows], drawn)

    def of_own(self, logits: Rows, drawn: Drawn) -> DeviceRows:
        """Compute the log-probabilities from logits of the reported rows only."""
        chosen = drawn.token_ids if self.is_whole else drawn.token_ids[self.rows]
        return extract_checked(logits, self._requests.of_tokens(chosen))


def _processed(
    logits: Rows,
    changed: Rows | None,
    drawn: Drawn,
    report: _Report,
    temperatures: FloatArray,
) -> HostRows:
    """Compute the log-probabilities under the distributions that the tokens were sampled from."""
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
    """Return for each row its index in `rows`, or -1."""
    indices = [-1] * num_rows
    for index, row in enumerate(rows):
        indices[row] = index
    return indices


def _wants_raw(params: SamplingParams) -> bool:
    is_asked = params.logprobs is not None and params.logprobs_mode != "processed_logprobs"
    return is_asked or params.picks_best


def _wants_processed(params: SamplingParams) -> bool:
    return params.logprobs is not None and params.logprobs_mode != "raw_logprobs"


def _draw(logits: Rows, changed: Rows | None, settings: DrawParams) -> Drawn:
    if changed is None:
        return draw(logits, settings)
    first, rest = slice(0, len(changed)), slice(len(changed), None)
    drawn = Drawn.empty(len(logits))
    drawn.put(first, draw(changed, settings.rows(first)))
    if len(changed) < len(logits):
        drawn.put(rest, draw(logits[rest], settings.rows(rest)))
    return drawn


def _copied(logits: Rows, changed: Rows | None, rows: list[int]) -> Any:
    """Return copies of some rows, from `changed` for the first rows of the batch, otherwise from `logits`."""
    num_changed = 0 if changed is None else len(changed)
    copied: Any = logits[rows]
    if changed is not None:
        own = [row for row in rows if row < num_changed]  # the first ones
        copied[: len(own)] = changed[own]
    return copied


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
    """Return `count` rows from `first` on, narrowed to `k` alternatives; None if `first` is -1."""
    return None if rows is None or first < 0 else rows.rows(first, first + count).narrowed(k)
