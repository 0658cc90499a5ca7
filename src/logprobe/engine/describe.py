"""What a request's numbers are: stage, count, settings and source, in the words that travel with them.

Before it: the request's parameters. After it: the containers and the output, which carry the description.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from logprobe.records import LogprobsInfo
    from logprobe.records.info import Stage
    from logprobe.sampling import SamplingParams

STAGES: dict[str, tuple[Stage, ...]] = {
    "raw_logprobs": ("raw",),
    "processed_logprobs": ("processed",),
    "both": ("raw", "processed"),
}


class Describer:
    """Describes the numbers of one engine's requests; `source` names the engine, model and dtype."""

    def __init__(self, source: LogprobsInfo, vocab_size: int) -> None:
        self._source = source
        self._vocab_size = vocab_size

    def prompt(self, params: SamplingParams) -> LogprobsInfo:
        """Of prompt positions: always the model's own distribution."""
        return self._of(params.prompt_logprobs, stages=("raw",))

    def completion(self, params: SamplingParams, stages: tuple[Stage, ...]) -> LogprobsInfo:
        """Of generated positions at these stages."""
        if "processed" not in stages:
            return self._of(params.logprobs, stages=stages)
        return self._of(
            params.logprobs,
            stages=stages,
            temperature=params.temperature,
            top_k=params.top_k if params.top_k > 0 else None,
            top_p=params.top_p if params.top_p < 1 else None,
            min_p=params.min_p if params.min_p > 0 else None,
        )

    def request(self, params: SamplingParams) -> LogprobsInfo | None:
        """Of a whole output: its completions' numbers, or else its prompt's; None where none are asked."""
        if params.logprobs is not None:
            return self.completion(params, STAGES[params.logprobs_mode])
        return None if params.prompt_logprobs is None else self.prompt(params)

    def _of(self, asked: int | None, **fields: Any) -> LogprobsInfo:
        assert asked is not None, "only what was asked is described"
        delivered = self._vocab_size if asked == -1 else min(asked, self._vocab_size)
        return msgspec.structs.replace(
            self._source, num_logprobs_asked=asked, num_logprobs=delivered, **fields
        )
