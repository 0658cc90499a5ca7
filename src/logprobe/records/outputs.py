"""What a step hands on: the sampled tokens with their numbers, and whose they are.

Before it: the sampler. After it: the engine's requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from logprobe.records.columns import Array
    from logprobe.records.flat import FlatLogprobs
    from logprobe.records.step_lists import LogprobsLists
    from logprobe.records.steps import LogprobsTensors
    from logprobe.records.values import TopLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOutput:
    """Tokens that one step sampled, one row a sequence."""

    sampled_token_ids: Array  # (B,) or (B, n) integers
    logprobs: LogprobsTensors | LogprobsLists | None = None  # None: not asked for
    prompt_logprobs: Sequence[FlatLogprobs | None] | None = None  # B records
    num_samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None  # None: not cut
    spec_decode_accepted: Array | None = None  # (B,) integers: drafted tokens kept

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

    @classmethod
    def create(
        cls,
        sampled_token_ids: npt.ArrayLike,
        req_ids: Sequence[str],
        logprobs: LogprobsTensors | LogprobsLists | None = None,
    ) -> ModelRunnerOutput:
        """Tie rows to requests: sampled_token_ids (B,) or (B, n), one request id a row.

        Raises:
            ParameterError: a number of ids that differs from that of rows, or an id twice.
        """
        ids = np.asarray(sampled_token_ids)
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
        logprobs = self.sampler_output.logprobs
        return self.sampler_output.get_token_ids(row), None if logprobs is None else logprobs.latest(row)
