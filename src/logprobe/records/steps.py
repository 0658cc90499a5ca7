"""`LogprobsTensors`, `SamplerOutput`, `ModelRunnerOutput`: a step as engines hold it that are built on them.

Before them: such an engine. After them: `LogprobsLists` on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.host import on_host
from logprobe.records.lists import LogprobsLists, token_texts
from logprobe.records.rows import GivenLists
from logprobe.records.values import TokenLogprob, TopLogprobs, top_indices

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch
    from torch import Tensor

    from logprobe.records.flat import FlatLogprobs
    from logprobe.records.rows import GivenLogprobs
    from logprobe.records.store.columns import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsTensors:
    """One row of logits each, reduced to the numbers asked for; column 0 is the chosen token.

    Rows that hold several positions of each sequence (`create_empty`) stand sequence by sequence: position p
    of sequence b is row b * max_seq_len + p.
    """

    token_ids: Tensor  # (B, k + 1) int32; row b holds num_logprobs[b] + 1 entries, the rest is undefined
    logprobs: Tensor  # (B, k + 1) float32, nats
    ranks: Tensor  # (B,) int32, of the chosen token: 1 + number of strictly greater logits
    lse: Tensor  # (B,) float32, log-sum-exp of the row's logits
    num_logprobs: Tensor  # (B,) int32, k of each row
    is_valid: Tensor  # (B,) bool; False where the row held NaN or +inf, or nothing but -inf
    entropy: Tensor | None = None  # (B,) float32, nats; None where it was not asked for
    given: GivenLogprobs | None = None
    max_seq_len: int = 1  # rows of each sequence
    is_set: Tensor | None = None  # (B,) bool, rows that hold a position; None: all
    dense_logprobs: Tensor | None = None  # (B, V) float32, nats: whole rows; None: sparse

    def __repr__(self) -> str:
        return f"<LogprobsTensors: {len(self.ranks)} rows, k = {self.token_ids.shape[1] - 1}>"

    @property
    def is_sparse(self) -> bool:
        """Whether rows hold the chosen token and the k best alone, or also the whole vocabulary."""
        return self.dense_logprobs is None

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return len(self.ranks) // self.max_seq_len

    @classmethod
    def create_empty(
        cls,
        batch_size: int,
        max_seq_len: int,
        vocab_size: int,
        top_k: int = 5,
        sparse: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> LogprobsTensors:
        """Room on `device` for `max_seq_len` positions of each sequence, to be filled by `set_position`.

        Raises:
            ParameterError: a negative size, or a vocabulary of none.
        """
        import torch

        sizes = {"batch_size": batch_size, "max_seq_len": max_seq_len, "top_k": top_k}
        for name, size in {**sizes, "vocab_size": vocab_size - 1}.items():
            if size < 0:
                raise ParameterError(
                    name, "it is too small: vocab_size needs 1 or more, the others 0 or more"
                )
        num_rows, width = batch_size * max_seq_len, min(top_k, vocab_size) + 1
        with torch.device("cpu" if device is None else device):
            return cls(
                token_ids=torch.zeros((num_rows, width), dtype=torch.int32),
                logprobs=torch.full((num_rows, width), -torch.inf),
                ranks=torch.zeros(num_rows, dtype=torch.int32),
                lse=torch.zeros(num_rows),
                num_logprobs=torch.full((num_rows,), width - 1, dtype=torch.int32),
                is_valid=torch.zeros(num_rows, dtype=torch.bool),
                max_seq_len=max_seq_len,
                is_set=torch.zeros(num_rows, dtype=torch.bool),
                # Untouched pages cost no memory; is_set says which rows mean anything.
                dense_logprobs=None if sparse else torch.empty((num_rows, vocab_size)),
            )

    def set_position(
        self, batch_idx: int, position: int, logprobs: npt.ArrayLike | Tensor, token_id: int
    ) -> None:
        """Store one row of log-probabilities (V,) nats, on any device, and its chosen token.

        A row with NaN is flagged.

        Raises:
            ParameterError: an index or id out of range, a row of another width, +inf.
        """
        import torch

        row = self._row_of(batch_idx, position)
        host_row = logprobs.detach().cpu() if isinstance(logprobs, torch.Tensor) else logprobs
        values = np.asarray(host_row, np.float32)
        self._check_row(values, token_id)
        is_valid = bool(np.isfinite(values).any() and not np.isnan(values).any())
        best = top_indices(values, int(self.num_logprobs[row]) if is_valid else 0)
        columns = np.array([token_id, *best], np.int32)
        entries = values[columns] if is_valid else np.full(len(columns), np.nan, np.float32)
        self.token_ids[row, : len(columns)] = torch.from_numpy(columns)
        self.logprobs[row, : len(columns)] = torch.from_numpy(entries)
        self.ranks[row] = 1 + int(np.count_nonzero(values > values[token_id])) if is_valid else 0
        self.lse[row] = float(np.log(np.exp(values, dtype=np.float64).sum())) if is_valid else float("nan")
        self.is_valid[row] = is_valid
        if self.dense_logprobs is not None:
            self.dense_logprobs[row] = torch.from_numpy(values)
        if self.is_set is not None:
            self.is_set[row] = True

    def to_lists(self, tokenizer: Any = None) -> LogprobsLists:
        """The positions set so far on the host, sequence by sequence; texts from `tokenizer`.

        From a GPU all arrays come in one copy. A flagged row keeps its place: its logprob is NaN, its rank 0,
        its top list empty.
        """
        return self._as_lists(on_host(list(self._parts().values())), tokenizer)

    def _parts(self) -> dict[str, Tensor]:
        names = ["token_ids", "logprobs", "ranks", "lse", "num_logprobs", "is_valid"]
        tensors: dict[str, Tensor] = {name: getattr(self, name) for name in names}
        if self.entropy is not None:
            tensors["entropy"] = self.entropy
        if self.given is not None:
            for name in ("offsets", "token_ids", "logprobs", "ranks"):
                tensors[f"given.{name}"] = getattr(self.given, name)
        return tensors

    def _as_lists(self, values: Sequence[Array], tokenizer: Any) -> LogprobsLists:
        arrays: dict[str, Any] = dict(zip(self._parts(), values, strict=True))
        given = {name[6:]: arrays.pop(name) for name in list(arrays) if name.startswith("given.")}
        lists = LogprobsLists.of_rows(**arrays, given=GivenLists(**given) if given else None)
        if self.is_set is not None or self.max_seq_len != 1:
            lists = lists.in_sequences(np.flatnonzero(self._set_rows()), self.batch_size, self.max_seq_len)
        return lists if tokenizer is None else lists.with_texts(tokenizer)

    def latest(self, batch_idx: int, tokenizer: Any = None) -> TopLogprobs | None:
        """The last position set of one sequence, None where there is none; other sequences are not read."""
        first = self._row_of(batch_idx, 0) if self.max_seq_len else 0
        rows = np.flatnonzero(self._set_rows()[first : first + self.max_seq_len])
        return self._top_of(first + int(rows[-1]), tokenizer) if len(rows) else None

    def _row_of(self, batch_idx: int, position: int) -> int:
        if not 0 <= batch_idx < self.batch_size:
            raise ParameterError("batch_idx", f"{batch_idx} lies outside the {self.batch_size} sequences")
        if not 0 <= position < self.max_seq_len:
            raise ParameterError("position", f"{position} lies outside the {self.max_seq_len} positions")
        return batch_idx * self.max_seq_len + position

    def _check_row(self, values: Array, token_id: int) -> None:
        width = values.shape[-1] if self.dense_logprobs is None else self.dense_logprobs.shape[1]
        if values.shape != (width,) or not width:
            raise ParameterError("logprobs", f"one row of {width} values belongs here, not {values.shape}")
        if not 0 <= token_id < width:
            raise ParameterError("token_id", f"{token_id} lies outside the vocabulary of {width}")
        if np.isposinf(values).any():
            raise ParameterError("logprobs", "a value is +inf, which no log-probability is; check the logits")

    def _set_rows(self) -> Array:
        is_set: Array = (
            np.ones(len(self.ranks), np.bool_) if self.is_set is None else self.is_set.cpu().numpy()
        )
        return is_set

    def _top_of(self, row: int, tokenizer: Any) -> TopLogprobs:
        k = int(self.num_logprobs[row]) if self.is_valid[row] else 0
        ids = self.token_ids[row, : k + 1].tolist()
        logprobs = self.logprobs[row, : k + 1].tolist()
        texts = token_texts(ids, tokenizer)
        return TopLogprobs(
            position=row % self.max_seq_len,
            token_id=ids[0],
            token=texts[0],
            logprob=logprobs[0],
            rank=int(self.ranks[row]),
            top_k=[TokenLogprob(*entry) for entry in zip(ids[1:], texts[1:], logprobs[1:], strict=True)],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOutput:
    """Tokens that one step sampled, one row a sequence.

    A step may report numbers of some of its rows only: `logprobs_rows` then names the row of `logprobs` that
    belongs to each, -1 where none does.
    """

    sampled_token_ids: Array  # (B,) or (B, n) integers
    logprobs: LogprobsLists | LogprobsTensors | None = None  # raw; None: not asked for
    prompt_logprobs: Sequence[FlatLogprobs | None] | None = None  # B records
    num_samples: int = 1
    temperature: float | Array = 1.0  # of all rows, or (B,)
    top_p: float | Array = 1.0
    top_k: int | Array | None = None  # None: not cut
    spec_decode_accepted: Array | None = None  # (B,) integers: drafted tokens kept
    logprobs_rows: Array | None = None  # (B,) integers; None: row b is row b
    processed_logprobs: LogprobsLists | None = None  # of what the tokens were drawn from
    processed_rows: Array | None = None  # (B,) integers
    is_valid: Array | None = None  # (B,) bool; False: the logits held NaN or +inf, or nothing but -inf
    whole_rows: dict[int, Array] = field(default_factory=dict)  # row → its distribution, (V,) nats, read-only

    def __repr__(self) -> str:
        reported = "no logprobs" if self.logprobs is None else repr(self.logprobs)
        return f"<SamplerOutput: {self.batch_size} sequences, {reported}>"

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return int(self.sampled_token_ids.shape[0])

    def get_token_ids(self, batch_idx: int) -> Array:
        """Token ids sampled for one sequence, (n,).

        Raises:
            ParameterError: no such sequence.
        """
        if not 0 <= batch_idx < self.batch_size:
            raise ParameterError("batch_idx", f"{batch_idx} lies outside the {self.batch_size} sequences")
        return np.atleast_1d(self.sampled_token_ids[batch_idx])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """One step's sampled tokens by request, and what the step cost."""

    sampler_output: SamplerOutput
    req_ids: list[str]  # row b belongs to req_ids[b]
    req_id_to_index: dict[str, int] = field(default_factory=dict)
    hidden_states: Any = None  # (B, d), where they were asked for
    forward_time_ns: int = 0
    sample_time_ns: int = 0
    peak_memory_bytes: int = 0

    def __repr__(self) -> str:
        return f"<ModelRunnerOutput: {len(self.req_ids)} requests, {self.sampler_output!r}>"

    @classmethod
    def create(
        cls,
        sampled_token_ids: npt.ArrayLike,
        req_ids: Sequence[str],
        logprobs: LogprobsTensors | LogprobsLists | None = None,
    ) -> ModelRunnerOutput:
        """Tie rows to requests: sampled_token_ids (B,) or (B, n), one request id a row.

        Raises:
            ParameterError: rows of different lengths, ids that are no integers, a number of requests that
                differs from that of rows, or a request twice.
        """
        ids = _integers(sampled_token_ids)
        index = {req_id: row for row, req_id in enumerate(req_ids)}
        if ids.ndim not in {1, 2} or not len(index) == len(req_ids) == len(ids):
            raise ParameterError(
                "req_ids", f"{len(req_ids)} ids, {len(index)} different, for rows {ids.shape}; give one each"
            )
        output = SamplerOutput(
            sampled_token_ids=ids, logprobs=logprobs, num_samples=ids.shape[1] if ids.ndim == 2 else 1
        )
        return cls(sampler_output=output, req_ids=list(req_ids), req_id_to_index=index)

    def get_output_for_request(self, req_id: str) -> tuple[Array, TopLogprobs | None] | None:
        """Token ids (n,) of one request and its latest numbers; None where the step did not hold it.

        Reads that request's row alone.
        """
        row = self.req_id_to_index.get(req_id)
        if row is None:
            return None
        output = self.sampler_output
        place = row if output.logprobs_rows is None else int(output.logprobs_rows[row])
        logprobs = None if output.logprobs is None or place < 0 else output.logprobs.latest(place)
        return output.get_token_ids(row), logprobs


def _integers(token_ids: npt.ArrayLike) -> Array:
    try:
        ids = np.asarray(token_ids)
    except ValueError as error:
        raise ParameterError(
            "sampled_token_ids", "rows of different lengths; give each row as many"
        ) from error
    if ids.size and ids.dtype.kind not in "iu":
        raise ParameterError("sampled_token_ids", f"{ids.dtype} values where integers belong")
    return ids
