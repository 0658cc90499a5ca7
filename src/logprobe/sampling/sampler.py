"""`Sampler`: rows of logits → chosen tokens and the numbers that were asked about them.

Before it: the output head, one chunk of rows at a time. After it: the step's records.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from logprobe.kernels import extract
from logprobe.kernels.draw.api import draw, truncated_
from logprobe.kernels.draw.params import Drawn, DrawParams
from logprobe.records.rows import DeviceRows, HostRows
from logprobe.sampling.kept import kept_ids, log_kept_mass
from logprobe.sampling.params import extras_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from logprobe.records.host import Send
    from logprobe.records.store.columns import Array
    from logprobe.sampling.params import SamplingParams


SETTINGS = tuple(field.name for field in fields(DrawParams))
DRAWN = tuple(field.name for field in fields(Drawn))
LARGEST_K = 1 << 24  # the numbers up to it are exact in float32; no vocabulary is larger


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledRows:
    """Tokens sampled from B rows; `logprobs_rows` and `processed_rows` say which rows' numbers there are."""

    sampled_token_ids: Array  # (B,) integers
    is_valid: Array  # (B,) bool; False: the logits held NaN or +inf, or nothing but -inf
    num_logprobs: Array  # (B,) integers, the alternatives that each row asked for; 0 where it asked for none
    # Raw; None: not asked for. Where they are on their way to the host: what waits for them.
    logprobs: DeviceRows | HostRows | Callable[[], HostRows] | None = None
    logprobs_rows: Array  # (B,) integers, the row of `logprobs`; -1: none
    processed_logprobs: HostRows | None = None  # of what the tokens were drawn from
    processed_rows: Array  # (B,) integers, the row of `processed_logprobs`; -1: none
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

    def cut(self, row: int, count: int) -> tuple[HostRows | None, HostRows | None]:
        """Raw and processed numbers of rows [row, row + count), which asked for the same; None: for none.

        Waits until the raw ones are on the host.
        """
        assert not isinstance(self.logprobs, DeviceRows), "they were sent"
        raw = self.logprobs() if callable(self.logprobs) else self.logprobs
        k = int(self.num_logprobs[row])
        return (
            _cut(raw, int(self.logprobs_rows[row]), count, k),
            _cut(self.processed_logprobs, int(self.processed_rows[row]), count, k),
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

    def sample(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        uniforms: NDArray[np.float64],
        changed: Tensor | None = None,
        forced: Sequence[int | None] = (),
    ) -> SampledRows:
        """Draw from (B, V) float32 logits; `uniforms` is (B,) in [0, 1).

        `changed`, (R, V), is what the processors made of the first R rows; `logits` stays raw. `forced` names
        the token of a row whose draw does not count.
        """
        return self.draw(logits, params, uniforms, changed, forced).to_host()

    def draw(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        uniforms: NDArray[np.float64],
        changed: Tensor | None = None,
        forced: Sequence[int | None] = (),
    ) -> SampledRows:
        """`sample`, of which the raw log-probabilities stay where the logits are."""
        settings = _draw_params(params, uniforms)
        drawn = _draw(logits, changed, settings)
        for row, token_id in enumerate(forced):
            if token_id is not None:
                drawn.token_ids[row] = token_id
        raw_rows = [row for row, asked in enumerate(params) if _wants_raw(asked)]
        processed_rows = [row for row, asked in enumerate(params) if _wants_processed(asked)]
        raw = processed = None
        if raw_rows:
            # Most steps report every row or none: no copy then.
            part = logits if len(raw_rows) == len(params) else logits[raw_rows]
            raw = _report(part, drawn, raw_rows, params)
        if processed_rows:
            temperatures = np.array([asked.temperature for asked in params], dtype=np.float32)
            part = _copied(logits, changed, processed_rows)
            part = truncated_(part, drawn, processed_rows, temperatures)
            found = _report(part, drawn, processed_rows, params).to_host()
            num_changed = 0 if changed is None else len(changed)
            rows = np.array(processed_rows)
            is_touched = (drawn.cut_logits[rows] > -np.inf) | (rows < num_changed)
            mass = log_kept_mass(logits[processed_rows], part, temperatures[rows], is_touched)
            asks = np.array([params[row].kept_ids for row in processed_rows])
            processed = HostRows(
                found.token_ids,
                found.logprobs,
                found.ranks,
                {**found.extras, "log_kept_mass": mass},
                found.given,
                kept_ids(part, asks) if asks.any() else None,
            )
        return SampledRows(
            sampled_token_ids=drawn.token_ids,
            is_valid=drawn.is_valid,
            num_logprobs=_num_logprobs(params, logits.shape[1]),
            logprobs=raw,
            logprobs_rows=_places(raw_rows, len(params)),
            processed_logprobs=processed,
            processed_rows=_places(processed_rows, len(params)),
        )


def _places(rows: list[int], num_rows: int) -> NDArray[np.int64]:
    """For each row its place among `rows`, -1 where it is not one of them."""
    places = np.full(num_rows, -1)
    places[rows] = np.arange(len(rows))
    return places


def _num_logprobs(params: Sequence[SamplingParams], vocab_size: int) -> NDArray[np.int64]:
    """The alternatives of each row: what it asks for, at most the whole vocabulary (-1)."""
    asked = np.array([one.logprobs or 0 for one in params])
    return np.where(asked < 0, vocab_size, np.minimum(asked, vocab_size))


def _wants_raw(params: SamplingParams) -> bool:
    is_asked = params.logprobs is not None and params.logprobs_mode != "processed_logprobs"
    return is_asked or params.picks_best


def _wants_processed(params: SamplingParams) -> bool:
    return params.logprobs is not None and params.logprobs_mode != "raw_logprobs"


def _draw(logits: Tensor, changed: Tensor | None, settings: DrawParams) -> Drawn:
    if changed is None:
        return draw(logits, settings)
    num_changed = len(changed)
    first = draw(changed, _rows(settings, slice(0, num_changed)))
    if num_changed == len(logits):
        return first
    rest = draw(logits[num_changed:], _rows(settings, slice(num_changed, None)))
    return Drawn(*(np.concatenate([getattr(first, name), getattr(rest, name)]) for name in DRAWN))


def _rows(settings: DrawParams, rows: slice) -> DrawParams:
    return DrawParams(*(getattr(settings, name)[rows] for name in SETTINGS))


def _copied(logits: Tensor, changed: Tensor | None, rows: list[int]) -> Tensor:
    """Copies of some rows, of the changed logits where there are any."""
    num_changed = 0 if changed is None else len(changed)
    parts = [logits[[row for row in rows if row >= num_changed]]]
    if changed is not None:
        parts.insert(0, changed[[row for row in rows if row < num_changed]])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _draw_params(params: Sequence[SamplingParams], uniforms: NDArray[np.float64]) -> DrawParams:
    columns = np.array(
        [(one.temperature, min(max(one.top_k, 0), LARGEST_K), one.top_p, one.min_p) for one in params],
        dtype=np.float32,
    )
    temperatures, top_ks, top_ps, min_ps = np.ascontiguousarray(columns.T)
    return DrawParams(temperatures, top_ks, top_ps, min_ps, uniforms)


def _report(logits: Tensor, drawn: Drawn, rows: list[int], params: Sequence[SamplingParams]) -> DeviceRows:
    asked = [params[row] for row in rows]
    given = [one.logprob_token_ids for one in asked]
    return extract(
        logits,
        drawn.token_ids[rows],
        np.array([one.logprobs or 0 for one in asked]),
        given_ids=given if any(given) else None,
        **extras_of(*asked),
    )


def _cut(rows: HostRows | None, first: int, count: int, k: int) -> HostRows | None:
    """Rows that lie together from `first` on, with `k` alternatives each; none below 0."""
    return None if rows is None or first < 0 else rows.rows(first, first + count).narrowed(k)
