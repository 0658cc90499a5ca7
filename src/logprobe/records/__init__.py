"""What travels: per-step arrays, per-request containers, their byte layout and their Arrow form."""

from logprobe.records.steps import GivenLogprobs, LogprobsTensors

__all__ = ["GivenLogprobs", "LogprobsTensors"]
