"""`SamplingParams`: validated sampling parameters of one request.

Names and meanings follow vLLM and OpenAI where the two agree.
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
from logprobe.records.values import ExpertRoutes, IdLists

if TYPE_CHECKING:
    from numpy.typing import NDArray

    GivenRoutes: TypeAlias = ExpertRoutes | NDArray[Any]
else:
    GivenRoutes = ExpertRoutes  # the type sent to other processes; a field of a message cannot have both

NamedIds: TypeAlias = "Sequence[int] | NDArray[np.int64] | None"
"""Token ids to report at one position in addition to the most likely ones; None: report no others."""
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "both"]
MODES: Final = ("raw_logprobs", "processed_logprobs", "both")
COUNTS: Final = ("logprobs", "prompt_logprobs")
FLAGS: Final = (
    *("ignore_eos", "include_stop_str_in_output", *KERNEL_EXTRAS, "explain", "kept_ids"),
    *("digest", "return_routed_experts"),
)
REPORTING_FIELDS: Final = (
    *(*COUNTS, "logprob_token_ids", "logprobs_mode"),
    *(*KERNEL_EXTRAS, "kept_ids", "explain", "digest", "return_hidden_states", "return_routed_experts"),
)
"""Parameters that determine what outputs report about tokens; all others determine the tokens."""
PENALTIES: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@strict_keywords
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    The parameters up to `lora` determine the tokens. Those from `logprobs` on determine what outputs report
    about tokens, and change no token.

    Raises `ParameterError` for unknown keywords and values out of range.

    Args:
        n: number of completions of the prompt.
        best_of: number of completions sampled, of which the `n` with the highest mean raw logprob are
            returned.
        max_tokens: maximum number of tokens to generate; 0 only scores the prompt.
        min_tokens: minimum number of tokens before the text may end (by EOS, `stop_token_ids` or `stop`).
        stop: strings that end the text; the text is truncated before them.
        include_stop_str_in_output: truncate the text after the stop string instead of before it.
        stop_token_ids: token ids that end the text.
        ignore_eos: continue after the model's end-of-sequence token.
        seed: any integer (with an engine process, of at most 64 bits); the same seed, prompt and parameters
            give the same tokens, whatever else runs.
        temperature: 0 picks the most likely token; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this total probability (nucleus
            sampling, Holtzman et al. 2020).
        min_p: keep tokens with at least this fraction of the most likely token's probability.
        repetition_penalty: for each token that occurs in the prompt or completion, divide its logit by this
            number if the logit is positive, else multiply the logit by it.
        presence_penalty: number in [-2, 2] to subtract from the logits of generated tokens.
        frequency_penalty: number in [-2, 2] to subtract from a token's logit once for each time the token was
            generated.
        logit_bias: token id → nats added to its logit.
        allowed_token_ids: the only token ids that may be sampled.
        bad_words: texts that must not be generated, with or without a leading space; at most 256 characters
            each.
        response_format: OpenAI's `text`, `json_object` or `json_schema`; also `regex`, `choice` or `ebnf`,
            each with its value under a key of the same name. All but `text` need the extra `grammar`.
        logits_processors_args: arguments of the logits processors that the engine was started with.
        lora: name of the LoRA adapter to use (`None`: the base model).
        routed_experts: the experts to use in each layer of a mixture of experts, instead of those that the
            router chooses: an integer array (positions, layers with experts, experts per token) for the first
            positions of the text, such as `RequestOutput.replayed_experts` returns. The experts' weights are
            still the router's.
        logprobs: number of alternatives per generated token, in addition to the chosen token (`None`: off;
            0: the chosen token only; -1: the whole vocabulary).
        prompt_logprobs: number of alternatives per prompt token, as for `logprobs`. The prompt's logprobs are
            raw; with `processed_logprobs`, they are those at the request's temperature (0 counts as 1). No
            other sampling parameter affects them.
        logprob_token_ids: report these ids, with their ranks, at every reported position. A list of lists
            gives the ids of each position: with `prompt_logprobs`, one list per prompt token (empty for the
            first, which has no prediction); otherwise, one list per generated token. Positions after the last
            list report none.
        logprobs_mode: `raw_logprobs`: the model's own distribution; `processed_logprobs`: the distribution
            that the token was sampled from; `both`: both.
        entropy: report the entropy of each reported distribution, in nats.
        varentropy: report the variance of the surprisal of each reported distribution, in nats squared.
        margin: report the difference of the two highest logprobs of each distribution, in nats.
        kept_ids: report the token ids that masks and truncation kept in each processed distribution.
        explain: report how each processor changed the listed candidates, at every position.
        digest: report a digest of the raw row of each generated token, from which a holder of the weights can
            verify the reply (`logprobe verify`).
        return_hidden_states: report hidden states of the prompt and of generated tokens. `last`: the states
            after the final norm, from which the output head computes logits. A list of layer numbers: as in
            transformers, 0 is the embeddings, n is the output of layer n, and the number of layers is the
            same as `last`; negative numbers count from the end.
        return_routed_experts: report the experts that were used for each prompt token and, for each generated
            token, those that were used for the token before it.
    """

    # Sampling: the tokens of the completions.
    n: int = 1
    best_of: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    response_format: Mapping[str, Any] | None = None
    logits_processors_args: Mapping[str, Any] | None = None
    lora: str | None = None
    routed_experts: GivenRoutes | None = None
    # Reports: what outputs say about tokens.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int | Sequence[int]] | IdLists | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    entropy: bool = False
    varentropy: bool = False
    margin: bool = False
    kept_ids: bool = False
    explain: bool = False
    digest: bool = False
    return_hidden_states: Literal["last"] | Sequence[int] | None = None
    return_routed_experts: bool = False

    def __post_init__(self) -> None:
        self._normalise()
        self._check_counts()
        self._check_shape_of_distribution()
        self._check_reports()
        self._check_processors()

    def _normalise(self) -> None:
        """Replace every value with a copy of its annotated type that can be sent to other processes."""
        normal: dict[str, object] = {}
        for name in ("n", "best_of", "max_tokens", "min_tokens", "top_k", "seed", *COUNTS):
            value = getattr(self, name)
            if value is not None or name in {"n", "max_tokens", "min_tokens", "top_k"}:
                normal[name] = as_int(name, value)
        for name in ("temperature", "top_p", "min_p", *PENALTIES):
            normal[name] = _float(name, getattr(self, name))
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None or name == "stop_token_ids":
                normal[name] = _ints(name, () if value is None else value)
        normal["logprob_token_ids"] = named_ids("logprob_token_ids", self.logprob_token_ids)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        normal["stop"] = _texts("stop", () if stop is None else stop)
        banned = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words
        words = _items("bad_words", () if banned is None else banned, "texts")
        normal["bad_words"] = tuple(_unicode("bad_words", plain(word)) for word in words)
        for name in (*FLAGS, "logprobs_mode", "lora", "response_format", "logits_processors_args"):
            value = getattr(self, name)
            if type(value) not in PLAIN_TYPES:
                normal[name] = _plain(name, value)
        if self.return_hidden_states is not None:
            normal["return_hidden_states"] = layer_numbers("return_hidden_states", self.return_hidden_states)
        if self.routed_experts is not None:
            normal["routed_experts"] = ExpertRoutes.of("routed_experts", self.routed_experts)
        if self.logit_bias is not None:
            normal["logit_bias"] = _biases(_plain("logit_bias", self.logit_bias))
        for name in ("logit_bias", "logits_processors_args"):
            if normal.get(name) == {}:
                normal[name] = None  # an empty mapping requests nothing
        for name, value in normal.items():
            object.__setattr__(self, name, value)

    def _check_counts(self) -> None:
        require(self.n >= 1, "n", f"must be at least 1, got {self.n}")
        require(self.max_tokens >= 0, "max_tokens", f"must be 0 or more, got {self.max_tokens}")
        if self.best_of is not None:
            require(self.best_of >= self.n, "best_of", f"must be at least n ({self.n}), got {self.best_of}")
            is_drawn = self.max_tokens > 0 or self.best_of == self.n
            require(is_drawn, "best_of", "needs generated tokens to compare; set max_tokens to 1 or more")

    def _check_shape_of_distribution(self) -> None:
        require(self.temperature >= 0, "temperature", f"must be 0 or more, got {self.temperature}")
        require(self.top_k >= -1, "top_k", f"must be -1 or 0 (all) or positive, got {self.top_k}")
        require(0 < self.top_p <= 1, "top_p", f"must be in (0, 1], got {self.top_p}")
        require(0 <= self.min_p <= 1, "min_p", f"must be in [0, 1], got {self.min_p}")

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
        require(is_name, "lora", f"must be the name of a LoRA adapter or None, got {self.lora!r}")
        is_reported = any(value is not None for value in counts.values())
        for name in (*KERNEL_EXTRAS, "logprob_token_ids"):
            is_asked = bool(getattr(self, name))
            remedy = "needs logprobs or prompt_logprobs; set one of them (0: the chosen token only)"
            require(is_reported or not is_asked, name, remedy)
        if self.digest:
            has_raw = self.logprobs is not None and self.logprobs_mode != "processed_logprobs"
            require(has_raw, "digest", "needs raw logprobs; set logprobs (0: the chosen token only)")
        is_both = self.prompt_logprobs is not None and self.logprobs is not None and self.max_tokens > 0
        remedy = (
            "with one list per position applies to either prompt_logprobs or logprobs; set only one of them"
        )
        require(not (self.names_positions and is_both), "logprob_token_ids", remedy)

        has_processed = self.logprobs is not None and self.logprobs_mode != "raw_logprobs"
        remedy = "needs processed logprobs; set logprobs and logprobs_mode"
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
        """Number of completions to sample: `best_of` if set, otherwise `n`."""
        return self.best_of or self.n

    @property
    def picks_best(self) -> bool:
        """True if more completions are sampled than are returned."""
        return self.num_samples > self.n

    @property
    def asks_processors(self) -> bool:
        """True if the parameters have arguments for a built-in or registered logits processor."""
        return self.logits_processors_args is not None or field_values(self) != DEFAULT_VALUES

    @property
    def captures(self) -> bool:
        """True if outputs report activations or routes of the model's layers, or routes are given."""
        return (
            self.return_hidden_states is not None
            or self.return_routed_experts
            or self.routed_experts is not None
        )

    @property
    def names_positions(self) -> bool:
        """True if `logprob_token_ids` has one list per position."""
        return isinstance(self.logprob_token_ids, IdLists)

    def named_ids_at(self, position: int) -> NamedIds:
        """Return the ids in `logprob_token_ids` for a position; None if there are none at any position.

        With lists per position, `position` is an index of a prompt token if `prompt_logprobs` is set, and of
        a generated token otherwise. Positions after the last list get an empty result.
        """
        ids = self.logprob_token_ids
        if isinstance(ids, IdLists):
            return ids[position] if position < len(ids) else ()
        return cast("Sequence[int] | None", ids)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is picked without sampling."""
        return self.temperature == 0


def extras_of(*params: SamplingParams) -> dict[str, Any]:
    """Return a flag for each extra column that kernels compute: True if any request asks for the column."""
    return {name: any(map(attrgetter(name), params)) for name in KERNEL_EXTRAS}


def distribution_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a `LogprobsInfo` that define the distribution that tokens are sampled from."""
    return {
        "temperature": params.temperature,
        "top_k": params.top_k if params.top_k > 0 else None,
        "top_p": params.top_p if params.top_p < 1 else None,
        "min_p": params.min_p if params.min_p > 0 else None,
        "presence_penalty": params.presence_penalty or None,
        "frequency_penalty": params.frequency_penalty or None,
        "repetition_penalty": params.repetition_penalty if params.repetition_penalty != 1 else None,
    }


def nth_seed(seed: int, repeat: int) -> int:
    """Return the seed for a repetition of a request: `seed` itself for `repeat` 0, else a 64-bit hash."""
    if repeat == 0:
        return seed
    return int(np.random.SeedSequence([abs(seed), int(seed < 0), repeat]).generate_state(1, np.uint64)[0])


def as_int(name: str, value: Any) -> int:
    """Convert `value` to an int.

    Raises:
        ParameterError: `value` is not an integer; the error's parameter is `name`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    require(number is not None and not isinstance(value, bool), name, f"must be an integer, got {value!r}")
    return cast("int", number)


def _float(name: str, value: Any) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    require(is_number and abs(value) <= LARGEST_FLOAT, name, f"must be a finite float32, got {value!r}")
    return float(value)


def layer_numbers(name: str, value: Any) -> Literal["last"] | tuple[int, ...]:
    """Convert `value` to `last` or to a tuple of layer numbers.

    Raises:
        ParameterError: `value` is neither, is empty, or has a number twice; the error's parameter is `name`.
    """
    if isinstance(value, str):
        require(value == "last", name, f"must be 'last' or a list of layer numbers, got {value!r}")
        return "last"
    layers = tuple(as_int(name, layer) for layer in _items(name, value, "layer numbers"))
    require(layers, name, "must name at least one layer; leave it out for no hidden states")
    require(len(set(layers)) == len(layers), name, "must name each layer once", got=value)
    return layers


def _items(name: str, values: Any, what: str) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError as error:
        raise ParameterError(name, f"must be a list of {what}, got {values!r}") from error


def _ints(name: str, values: Any) -> tuple[int, ...]:
    return tuple(as_int(name, value) for value in _items(name, values, "token ids"))


def named_ids(name: str, value: Any) -> tuple[int, ...] | IdLists | None:
    """Convert `value` to a tuple of ids for all positions, or to one list of ids per position.

    An empty value becomes None.

    Raises:
        ParameterError: `value` does not hold token ids; the error's parameter is `name`.
    """
    if value is None or isinstance(value, IdLists):
        return value
    items = _items(name, value, "token ids")
    if not items or isinstance(items[0], str) or not np.iterable(items[0]):
        return _ints(name, items) or None
    if set(map(type, items)) == {list}:  # fast path for JSON input, which may have thousands of lists
        numbers = [*chain.from_iterable(items)]
        ids: NDArray[Any] = np.array(numbers) if set(map(type, numbers)) == {int} else np.empty(0)
        if ids.dtype == np.int64:  # larger integers give another dtype
            return IdLists(np.cumsum([0, *map(len, items)], dtype=np.int64), ids)
    return IdLists.of([_id_array(name, item, place) for place, item in enumerate(items)])


def _id_array(name: str, value: Any, place: int) -> NDArray[np.int64]:
    # Do not iterate 0-d tensors, whose type claims to be iterable, or strings and dicts.
    try:
        is_whole = hasattr(value, "__array__") or isinstance(value, str | bytes | dict)
        array = np.asarray(value if is_whole else [*value])
    except (TypeError, ValueError):
        array = np.empty((0, 0))
    is_list = array.ndim == 1 and (np.issubdtype(array.dtype, np.integer) or not array.size)
    require(is_list, name, f"must be lists of token ids, one per position; item {place} is {value!r:.60}")
    return array.astype(np.int64)


def _plain(name: str, value: Any) -> Any:
    try:
        return plain(value)
    except TypeError as error:
        raise ParameterError(name, f"a key is neither a string nor a number: {error}") from error


def _biases(by_id: Any) -> dict[int, float]:
    """Convert `by_id` to a dict from token id to bias in nats; its keys may be strings, as in JSON."""
    biases = to_args({"logit_bias": by_id}, LogitBiasArgs, "logit_bias").logit_bias
    require(len(biases) == len(by_id), "logit_bias", "has a token id twice, as a number and as a string")
    return biases


def _texts(name: str, values: Any) -> tuple[str, ...]:
    texts = tuple(map(plain, _items(name, values, "strings")))
    for text in texts:
        require(isinstance(text, str), name, f"must hold strings, got {text!r}")
        require(text, name, "an empty string would stop the text immediately; leave it out")
        _unicode(name, text)
    return texts


def _unicode(name: str, text: Any) -> Any:
    is_unicode = not any("\ud800" <= character <= "\udfff" for character in str(text))
    require(is_unicode, name, f"{text!r} is not valid Unicode text")
    return text
