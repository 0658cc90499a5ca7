"""Step results on the host, sequence by sequence (`LogprobsLists`).

Before it: `LogprobsTensors`, or a producer of single positions. After it: replies that want values.
"""

from __future__ import annotations

from threading import Lock

from logprobe.errors import ParameterError
from logprobe.records.columns import Column
from logprobe.records.flat import FlatLogprobs
from logprobe.records.values import TokenLogprob, TopLogprobs


class LogprobsLists:
    """Positions of several sequences in typed columns; any thread may append or read."""

    def __init__(self, num_sequences: int = 1) -> None:
        if num_sequences < 0:
            raise ParameterError("num_sequences", f"{num_sequences} is negative")
        self._lock = Lock()
        self._rows = [FlatLogprobs() for _ in range(num_sequences)]
        self._positions = [Column("int64") for _ in range(num_sequences)]

    def append(self, seq_idx: int, logprobs: TopLogprobs) -> None:
        """Add a position to a sequence; a sequence beyond the last makes room up to it.

        Raises:
            ParameterError: a negative sequence index, or what `FlatLogprobs.append_fast` refuses.
        """
        if seq_idx < 0:
            raise ParameterError("seq_idx", f"{seq_idx} is negative")
        entries = [TokenLogprob(logprobs.token_id, logprobs.token, logprobs.logprob), *logprobs.top_k]
        with self._lock:
            while len(self._rows) <= seq_idx:
                self._rows.append(FlatLogprobs())
                self._positions.append(Column("int64"))
            rows = self._rows[seq_idx]
            self._positions[seq_idx].write_one(len(rows), logprobs.position)
            rows.append_fast(
                [entry.token_id for entry in entries],
                [entry.logprob for entry in entries],
                [logprobs.rank, *range(1, len(entries))],
                [entry.token for entry in entries],
            )

    def get_sequence(self, seq_idx: int) -> list[TopLogprobs]:
        """Positions of one sequence in the order in which they came; empty beyond the last sequence."""
        with self._lock:
            if not 0 <= seq_idx < len(self._rows):
                return []
            rows = self._rows[seq_idx][:]
            positions = self._positions[seq_idx].read(0, len(rows)).tolist()
        return [_top_of(rows, place, position) for place, position in enumerate(positions)]

    def get_all(self) -> list[list[TopLogprobs]]:
        """Positions of every sequence."""
        return [self.get_sequence(seq_idx) for seq_idx in range(len(self))]

    def latest(self, seq_idx: int) -> TopLogprobs | None:
        """The last position of one sequence, None where there is none; no other position is read."""
        with self._lock:
            rows = self._rows[seq_idx] if 0 <= seq_idx < len(self._rows) else FlatLogprobs()
            if not len(rows):
                return None
            last = len(rows) - 1
            return _top_of(rows, last, int(self._positions[seq_idx].row(last)))

    def slice_request(self, row: int) -> FlatLogprobs:
        """One sequence as columns, each position as wide as its own k; shares memory.

        Raises:
            ParameterError: no such sequence.
        """
        with self._lock:
            if not 0 <= row < len(self._rows):
                raise ParameterError("row", f"{row} lies outside the {len(self._rows)} sequences")
            return self._rows[row][:]

    def __len__(self) -> int:
        return len(self._rows)

    def total_tokens(self) -> int:
        """Number of positions of all sequences."""
        with self._lock:
            return sum(len(rows) for rows in self._rows)


def _top_of(rows: FlatLogprobs, place: int, position: int) -> TopLogprobs:
    ids, logprobs, ranks, texts = rows.rows.store.row(place)
    tokens = ["" if text is None else text for text in texts or [None] * len(ids)]
    top = zip(ids[1:], tokens[1:], logprobs[1:], strict=True)
    return TopLogprobs(
        position, ids[0], tokens[0], logprobs[0], ranks[0] or 0, [TokenLogprob(*entry) for entry in top]
    )
