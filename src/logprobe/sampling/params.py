"""`SamplingParams`: what one request asks for, checked when it is made.

Names and meanings are vLLM's and OpenAI's where the two agree.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

import numpy as np

from logprobe.config import strict_keywords
from logprobe.errors import ParameterError, require
from logprobe.processors.arguments import (
    DEFAULT_VALUES,
    LARGEST_FLOAT,
    PLAIN_TYPES,
    LogitBiasArgs,
    field_args,
    field_values,
    plain,
    to_args,
)
from logprobe.records.rows import KERNEL_EXTRAS
from logprobe.records.values import IdLists

if TYPE_CHECKING:
    from numpy.typing import NDArray

NamedIds: TypeAlias = "Sequence[int] | NDArray[np.int64] | None"
"""The ids that one position reports beside the best; None: none are named."""
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "both"]
MODES: Final = ("raw_logprobs", "processed_logprobs", "both")
COUNTS: Final = ("logprobs", "prompt_logprobs")
FLAGS: Final = ("ignore_eos", "include_stop_str_in_output", *KERNEL_EXTRAS, "explain", "kept_ids")
PENALTIES: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty")


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
        seed: any integer; the same (seed, prompt, parameters) give the same tokens whatever runs beside.
        stop: strings that end the text, which is cut before them.
        include_stop_str_in_output: cut the text after the stop string that ends it, not before.
        stop_token_ids: token ids that end the text.
        ignore_eos: go on after the model's end-of-sequence token.
        logprobs: alternatives per generated token (`None` off, 0 the chosen token only, -1 the whole
            vocabulary); the chosen token always comes too.
        prompt_logprobs: the same per prompt token, of the model's own distribution; `processed_logprobs` are
            those at the temperature, which alone acts on a prompt (0 is taken for 1).
        logprob_token_ids: report these ids at every position reported, with their true ranks. A list of
            lists names those of each position: with `prompt_logprobs` one list a prompt token (none of the
            first, which nothing predicts), else one a generated token, those beyond the last having none.
        logprobs_mode: `raw_logprobs` is the model's own distribution, `processed_logprobs` the one the
            token was drawn from, `both` gives both.
        entropy: report the entropy of each distribution reported, in nats.
        varentropy: report the variance of its surprisal, in nats squared.
        margin: report the nats between its two likeliest tokens.
        kept_ids: report the ids that masks and truncation left, with each processed distribution.
        min_tokens: tokens to generate before any that ends the text (EOS, `stop_token_ids`, `stop`).
        repetition_penalty: divide (multiply, where negative) the logits of tokens seen in prompt or
            completion by this.
        presence_penalty: subtract this from the logits of tokens generated, in [-2, 2].
        frequency_penalty: subtract this from them once a time that they were generated, in [-2, 2].
        logit_bias: token id → nats added to its logit.
        allowed_token_ids: the only tokens that may be drawn.
        bad_words: texts that must not be generated, with a leading space or without, each of at most 256
            characters.
        response_format: OpenAI's `text`, `json_object` or `json_schema`; also `regex`, `choice`, `ebnf`,
            each with a value of the same name (extra `grammar`).
        logits_processors_args: arguments of the processors that the engine was started with.
        explain: report what each processor did to the candidates listed, at every position.
        lora: the LoRA weights to run on, by the name that they were loaded under (`None`: the base model).
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int | Sequence[int]] | IdLists | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    entropy: bool = False
    varentropy: bool = False
    margin: bool = False
    kept_ids: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    response_format: Mapping[str, Any] | None = None
    logits_processors_args: Mapping[str, Any] | None = None
    explain: bool = False
    lora: str | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_counts()
        self._check_shape_of_distribution()
        self._check_reports()
        self._check_processors()

    def _normalise(self) -> None:
        """Make every value one of the annotated types, and a copy: it crosses to other processes as it is."""
        normal: dict[str, object] = {}
        for name in ("n", "best_of", "max_tokens", "min_tokens", "top_k", "seed", *COUNTS):
            value = getattr(self, name)
            if value is not None or name in {"n", "max_tokens", "min_tokens", "top_k"}:
                normal[name] = _int(name, value)
        for name in ("temperature", "top_p", "min_p", *PENALTIES):
            normal[name] = _float(name, getattr(self, name))
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None or name == "stop_token_ids":
                normal[name] = _ints(name, () if value is None else value)
        normal["logprob_token_ids"] = named_ids("logprob_token_ids", self.logprob_token_ids)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        normal["stop"] = _texts("stop", () if stop is None else stop)
        words = _items("bad_words", () if self.bad_words is None else self.bad_words, "texts")
        normal["bad_words"] = tuple(_unicode("bad_words", plain(word)) for word in words)
        for name in (*FLAGS, "logprobs_mode", "lora", "response_format", "logits_processors_args"):
            value = getattr(self, name)
            if type(value) not in PLAIN_TYPES:
                normal[name] = _plain(name, value)
        if self.logit_bias is not None:
            normal["logit_bias"] = _biases(_plain("logit_bias", self.logit_bias))
        for name in ("logit_bias", "logits_processors_args"):
            if normal.get(name) == {}:
                normal[name] = None  # it asks nothing
        for name, value in normal.items():
            object.__setattr__(self, name, value)

    def _check_counts(self) -> None:
        require(self.n >= 1, "n", f"must be at least 1, got {self.n}")
        require(self.max_tokens >= 0, "max_tokens", f"must be 0 or more, got {self.max_tokens}")
        if self.best_of is not None:
            require(self.best_of >= self.n, "best_of", f"must be at least n ({self.n}), got {self.best_of}")
            is_drawn = self.max_tokens > 0 or self.best_of == self.n
            require(is_drawn, "best_of", "compares generated tokens; max_tokens must be positive")

    def _check_shape_of_distribution(self) -> None:
        require(self.temperature >= 0, "temperature", f"must be 0 or more, got {self.temperature}")
        require(self.top_k >= -1, "top_k", f"must be -1 or 0 (all) or positive, got {self.top_k}")
        require(0 < self.top_p <= 1, "top_p", f"must lie in (0, 1], got {self.top_p}")
        require(0 <= self.min_p <= 1, "min_p", f"must lie in [0, 1], got {self.min_p}")

    def _check_reports(self) -> None:
        counts = {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        for name, value in counts.items():
            is_count = value is None or value >= -1
            require(is_count, name, f"must be None, -1 (whole vocabulary), 0 or positive, got {value}")
        known = f"must be one of {', '.join(MODES)}, got {self.logprobs_mode!r}"
        require(self.logprobs_mode in MODES, "logprobs_mode", known)
        for name in FLAGS:
            value = getattr(self, name)
            require(isinstance(value, bool), name, f"must be True or False, got {value!r}")
        is_name = self.lora is None or (isinstance(self.lora, str) and self.lora)
        require(is_name, "lora", f"must be the name of LoRA weights or None, got {self.lora!r}")
        is_reported = any(value is not None for value in counts.values())
        for name in (*KERNEL_EXTRAS, "logprob_token_ids"):
            is_asked = bool(getattr(self, name))
            remedy = "comes with logprobs or prompt_logprobs; set one of them (0: the chosen token only)"
            require(is_reported or not is_asked, name, remedy)
        is_both = self.prompt_logprobs is not None and self.logprobs is not None and self.max_tokens > 0
        remedy = "position by position are those of prompt_logprobs or of logprobs; ask for one of them"
        require(not (self.names_positions and is_both), "logprob_token_ids", remedy)

        has_processed = self.logprobs is not None and self.logprobs_mode != "raw_logprobs"
        remedy = "comes with processed numbers; set logprobs and logprobs_mode"
        require(has_processed or not self.kept_ids, "kept_ids", remedy)

    def _check_processors(self) -> None:
        args = self.logits_processors_args
        is_object = args is None or (isinstance(args, Mapping) and all(isinstance(key, str) for key in args))
        require(is_object, "logits_processors_args", "must be an object", got=args)
        is_shown = self.logprobs is not None or not self.explain
        require(is_shown, "explain", "reports on the candidates that logprobs lists; set logprobs too")
        fits = self.min_tokens <= self.max_tokens
        require(fits, "min_tokens", f"is {self.min_tokens}, more than max_tokens ({self.max_tokens})")
        if field_values(self) != DEFAULT_VALUES:
            field_args(self)

    @property
    def num_samples(self) -> int:
        """Completions to draw: `best_of`, or `n` where that is not given."""
        return self.best_of or self.n

    @property
    def picks_best(self) -> bool:
        """Whether more completions are drawn than returned."""
        return self.num_samples > self.n

    @property
    def asks_processors(self) -> bool:
        """Whether it gives arguments to logits processors, by fields of their own or by name."""
        return self.logits_processors_args is not None or field_values(self) != DEFAULT_VALUES

    @property
    def names_positions(self) -> bool:
        """Whether `logprob_token_ids` differ from position to position."""
        return isinstance(self.logprob_token_ids, IdLists)

    def named_ids_at(self, position: int) -> NamedIds:
        """The ids that are named at a position of what is reported; None where none ever are.

        Positions are the prompt's, or where its numbers are not asked those of the tokens generated.
        """
        ids = self.logprob_token_ids
        if isinstance(ids, IdLists):
            return ids[position] if position < len(ids) else ()
        return cast("Sequence[int] | None", ids)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is picked without a draw."""
        return self.temperature == 0


def extras_of(*params: SamplingParams) -> dict[str, Any]:
    """The flag of each further column that a kernel gives, set where one of these asks for it."""
    return {name: any(map(attrgetter(name), params)) for name in KERNEL_EXTRAS}


def nth_seed(seed: int, repeat: int) -> int:
    """A seed of its own for each repetition, in the 64 bits that cross to any engine; the first is `seed`."""
    if repeat == 0:
        return seed
    return int(np.random.SeedSequence([abs(seed), int(seed < 0), repeat]).generate_state(1, np.uint64)[0])


def _int(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    require(number is not None and not isinstance(value, bool), name, f"must be an integer, got {value!r}")
    return cast("int", number)


def _float(name: str, value: Any) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    require(is_number and abs(value) <= LARGEST_FLOAT, name, f"must be a finite number, got {value!r}")
    return float(value)


def _items(name: str, values: Any, what: str) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError as error:
        raise ParameterError(name, f"must be a list of {what}, got {values!r}") from error


def _ints(name: str, values: Any) -> tuple[int, ...]:
    return tuple(_int(name, value) for value in _items(name, values, "token ids"))


def named_ids(name: str, value: Any) -> tuple[int, ...] | IdLists | None:
    """Ids for all positions, or position by position; None where there are none.

    Raises:
        ParameterError: neither, by `name`.
    """
    if value is None or isinstance(value, IdLists):
        return value
    items = _items(name, value, "token ids")
    if not items or isinstance(items[0], str) or not np.iterable(items[0]):
        return _ints(name, items) or None
    if set(map(type, items)) == {list}:  # as JSON has them: thousands of lists, all at once
        numbers = [*chain.from_iterable(items)]
        ids: NDArray[Any] = np.array(numbers) if set(map(type, numbers)) == {int} else np.empty(0)
        if ids.dtype == np.int64:  # larger ones have another type
            return IdLists(np.cumsum([0, *map(len, items)], dtype=np.int64), ids)
    return IdLists.of([_id_array(name, item, place) for place, item in enumerate(items)])


def _id_array(name: str, value: Any, place: int) -> NDArray[np.int64]:
    # A tensor of no dimension is iterable by its type alone; texts and dicts are, but no lists of ids.
    try:
        is_whole = hasattr(value, "__array__") or isinstance(value, str | bytes | dict)
        array = np.asarray(value if is_whole else [*value])
    except (TypeError, ValueError):
        array = np.empty((0, 0))
    is_list = array.ndim == 1 and (np.issubdtype(array.dtype, np.integer) or not array.size)
    require(is_list, name, f"must hold a list of token ids at each position; at {place} is {value!r:.60}")
    return array.astype(np.int64)


def _plain(name: str, value: Any) -> Any:
    try:
        return plain(value)
    except TypeError as error:
        raise ParameterError(name, f"holds a key that is no text and no number: {error}") from error


def _biases(by_id: Any) -> dict[int, float]:
    """Token id → nats, whether ids are numbers or, as in JSON, texts."""
    biases = to_args({"logit_bias": by_id}, LogitBiasArgs, "logit_bias").logit_bias
    require(len(biases) == len(by_id), "logit_bias", "names a token id twice, as a number and as a text")
    return biases


def _texts(name: str, values: Any) -> tuple[str, ...]:
    texts = tuple(map(plain, _items(name, values, "strings")))
    for text in texts:
        require(isinstance(text, str), name, f"must hold strings, got {text!r}")
        require(text, name, "an empty string would stop at once; leave it out")
        _unicode(name, text)
    return texts


def _unicode(name: str, text: Any) -> Any:
    is_unicode = not any("\ud800" <= character <= "\udfff" for character in str(text))
    require(is_unicode, name, f"{text!r} is not valid Unicode text")
    return text
