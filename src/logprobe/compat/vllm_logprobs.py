"""The names in `vllm.logprobs`: `Logprob`, `FlatLogprobs`, and functions that make and extend containers.

Differences from vLLM:

- `flat.token_ids` and the other columns: lists created on first read; changing such a list does not change
  the record. `flat.arrays` returns NumPy arrays
- `create_prompt_logprobs(True)[0]`: None, as in list form; vLLM gives `{}`
- `rank` among equally likely tokens: 1 plus the number of more likely tokens; vLLM counts the tokens that are
  at least as likely
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING, TypeAlias

from logprobe.errors import ParameterError
from logprobe.records.flat import FlatLogprobs
from logprobe.records.store.inputs import row_from_columns
from logprobe.records.values import Logprob, LogprobsOnePosition

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "FlatLogprobs",
    "Logprob",
    "LogprobsOnePosition",
    "PromptLogprobs",
    "SampleLogprobs",
    "append_logprobs_for_next_position",
    "create_prompt_logprobs",
    "create_sample_logprobs",
]

PromptLogprobs: TypeAlias = FlatLogprobs | list[LogprobsOnePosition | None]
SampleLogprobs: TypeAlias = FlatLogprobs | list[LogprobsOnePosition]


def create_prompt_logprobs(flat_logprobs: bool) -> PromptLogprobs:
    """Create a container for a prompt's log-probabilities, with None for the first token."""
    return FlatLogprobs([None]) if flat_logprobs else [None]


def create_sample_logprobs(flat_logprobs: bool) -> SampleLogprobs:
    """Create an empty container for the log-probabilities of generated tokens."""
    return FlatLogprobs() if flat_logprobs else []


def append_logprobs_for_next_position(
    request_logprobs: PromptLogprobs | SampleLogprobs,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    decoded_tokens: Iterable[str | None],
    rank: int,
    num_logprobs: int,
) -> None:
    """Append one position: the chosen token with `rank`, and the tokens with ranks 1 to `num_logprobs`.

    Further values in the columns are ignored; `num_logprobs == -1` keeps all.

    Raises:
        ParameterError: `num_logprobs` is below -1, or for the reasons given in `FlatLogprobs.append_fast`.
    """
    if num_logprobs < -1:
        raise ParameterError("num_logprobs", f"must be >= -1 (-1 keeps all), got {num_logprobs}")
    kept = list(token_ids) if num_logprobs == -1 else list(token_ids)[: num_logprobs + 1]
    ranks = chain((rank,), range(1, len(kept)))
    if isinstance(request_logprobs, FlatLogprobs):
        request_logprobs.append_fast(kept, logprobs, ranks, decoded_tokens)
        return
    row = row_from_columns(kept, logprobs, ranks, decoded_tokens)
    entries = map(Logprob, row.logprobs, row.ranks, row.texts or repeat(None))
    request_logprobs.append(dict(zip(kept, entries, strict=False)))
