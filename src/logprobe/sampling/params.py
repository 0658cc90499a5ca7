"""`SamplingParams`: what one request asks for, checked when it is made.

Names and meanings are vLLM's and OpenAI's where the two agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from logprobe.config import require, strict_keywords

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "both"]
MODES = ("raw_logprobs", "processed_logprobs", "both")


@strict_keywords
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """What one request asks for; an unknown keyword or a value out of range raises `ParameterError`.

    Args:
        n: completions of the prompt.
        best_of: completions drawn, of which the `n` with the highest mean raw logprob are returned.
        max_tokens: most tokens to generate; 0 only scores the prompt.
        temperature: 0 picks the most likely token; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this mass (nucleus sampling,
            Holtzman et al. 2020).
        min_p: keep tokens at least this likely relative to the most likely one.
        seed: the same (seed, prompt, parameters) give the same tokens whatever runs beside them.
        stop: strings that end the text, which is cut before them.
        stop_token_ids: token ids that end the text.
        ignore_eos: go on after the model's end-of-sequence token.
        logprobs: alternatives per generated token (`None` off, 0 the chosen token only, -1 the whole
            vocabulary); the chosen token always comes too.
        prompt_logprobs: the same per prompt token.
        logprob_token_ids: report these ids at every position, with their true ranks.
        logprobs_mode: `raw_logprobs` is the model's own distribution, `processed_logprobs` the one the
            token was drawn from, `both` gives both.
        entropy: report the entropy of each position's raw distribution, in nats.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | list[int] | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    entropy: bool = False

    def __post_init__(self) -> None:
        self._normalise()
        self._check_counts()
        self._check_shape_of_distribution()
        self._check_reports()

    def _normalise(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.logprob_token_ids is not None:
            object.__setattr__(self, "logprob_token_ids", tuple(self.logprob_token_ids))
        require(all(stop), "stop", "an empty string would stop at once; leave it out")

    def _check_counts(self) -> None:
        for name in ("n", "max_tokens", "top_k"):
            _require_int(name, getattr(self, name))
        require(self.n >= 1, "n", f"must be at least 1, got {self.n}")
        require(self.max_tokens >= 0, "max_tokens", f"must be 0 or more, got {self.max_tokens}")
        if self.best_of is not None:
            _require_int("best_of", self.best_of)
            require(self.best_of >= self.n, "best_of", f"must be at least n ({self.n}), got {self.best_of}")
        if self.seed is not None:
            _require_int("seed", self.seed)

    def _check_shape_of_distribution(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            require(is_number and math.isfinite(value), name, f"must be a finite number, got {value!r}")
        require(self.temperature >= 0, "temperature", f"must be 0 or more, got {self.temperature}")
        require(self.top_k >= -1, "top_k", f"must be -1 or 0 (all) or positive, got {self.top_k}")
        require(0 < self.top_p <= 1, "top_p", f"must lie in (0, 1], got {self.top_p}")
        require(0 <= self.min_p <= 1, "min_p", f"must lie in [0, 1], got {self.min_p}")

    def _check_reports(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _require_int(name, value)
                require(value >= -1, name, f"must be None, -1 (whole vocabulary), 0 or positive, got {value}")
        known = f"must be one of {', '.join(MODES)}, got {self.logprobs_mode!r}"
        require(self.logprobs_mode in MODES, "logprobs_mode", known)

    @property
    def num_samples(self) -> int:
        """Completions to draw: `best_of`, or `n` where that is not given."""
        return self.best_of or self.n

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is picked without a draw."""
        return self.temperature == 0


def _require_int(name: str, value: object) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    require(is_int, name, f"must be an integer, got {value!r}")
