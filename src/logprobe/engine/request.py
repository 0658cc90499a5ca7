"""Requests and their outputs: `Requests` creates and admits requests, `check_request` validates them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from logprobe import runtime
from logprobe.errors import ParameterError, PromptTooLongError, require
from logprobe.records.fields import Field, fields_of
from logprobe.records.forms.html import shaded
from logprobe.records.values import EqualByValue, IdLists
from logprobe.sampling.params import SamplingParams, extras_of
from logprobe.transport.messages import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from logprobe.errors import LogprobeError
    from logprobe.processors import ProcessorEffect
    from logprobe.records import FlatLogprobs, LogprobsInfo
    from logprobe.records.values import IntArray
    from logprobe.text.pieces import Piece
    from logprobe.transport.messages import Admitted, Drafts, FinishReason

SHOWN_CHARS = 36  # maximum length of a text in a `repr`


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class CompletionOutput(EqualByValue):
    """One completion of a prompt; its fields grow during generation and are final once it has finished.

    `logprobs` has raw log-probabilities, or processed ones with `logprobs_mode="processed_logprobs"`.
    `processed_logprobs` is set only with `logprobs_mode="both"`. `cumulative_logprob` is the sum of the
    chosen tokens' log-probabilities in `logprobs`, in nats; None if log-probabilities were not requested.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: FlatLogprobs | None = None
    processed_logprobs: FlatLogprobs | None = None
    cumulative_logprob: float | None = None
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or token id that ended the completion
    num_text_bytes: int | None = None  # length in bytes at which a stop string cut the text; None: not cut
    raw_logprob: float | None = None  # nats; sum of the chosen tokens' raw logprobs; None: not computed
    explanations: list[list[ProcessorEffect]] | None = None  # per token: effects of the processors
    digests: list[bytes] | None = None  # per token, 16 bytes; None: not requested
    row: NDArray[np.float32] | None = None  # (vocabulary,) nats, read-only; set if `Request.wants_row`
    drafts: Drafts | None = None  # set at the end if the engine speculates
    # (tokens, layers, hidden size), set at the end: the states from which each token was drawn
    hidden_states: NDArray[np.float32] | None = None
    # (tokens, layers with experts, experts per token), set at the end: the experts of the token before each
    routed_experts: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    error: LogprobeError | None = None

    def fields(self, *, processed: bool = False) -> list[Field]:
        """Return the log-probability of each value of the JSON text that the model wrote, in nats.

        See `logprobe.analysis.Field`. With `processed`, the log-probabilities are those of the processed
        distribution, for example under a grammar; this needs `logprobs_mode="both"`.

        Raises:
            ParameterError: log-probabilities were not requested, or the text is not JSON.
        """
        record = self.processed_logprobs if processed else self.logprobs
        require(
            record is not None,
            "logprobs",
            "were not requested; set logprobs=0, and logprobs_mode='both' for processed=True",
        )
        assert record is not None
        return fields_of(record, self.text)

    def __repr__(self) -> str:
        end = "" if self.finish_reason is None else f", {self.finish_reason}"
        return f"CompletionOutput({_short(self.text)}, {len(self.token_ids)} tokens{end})"

    def _repr_html_(self) -> str | None:
        return None if self.logprobs is None else shaded([self.logprobs])


def _short(text: str) -> str:
    shown = repr(text[: SHOWN_CHARS + 1])  # escapes count as characters
    return shown if len(shown) <= SHOWN_CHARS + 2 else f"{shown[:SHOWN_CHARS]}…{shown[0]}"


CompletionPiece: TypeAlias = "Piece[CompletionOutput]"
"""What has been added to a growing completion: new tokens and their text."""


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class RequestOutput(EqualByValue):
    """The output of one request; if it failed, `error` is set, and the other fields are incomplete."""

    request_id: str
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: FlatLogprobs | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    info: LogprobsInfo | None = None
    # Prompt tokens of the first sample that were in the prefix cache; None: unknown, or it is unfinished.
    num_cached_tokens: int | None = None
    weights_number: int = 0  # load number of the model weights that were used; 0: the initial weights
    params: SamplingParams | None = None  # None: the request was rejected before it started
    # (prompt tokens, layers, hidden size), set once the first completion has ended
    prompt_hidden_states: NDArray[np.float32] | None = None
    # (prompt tokens, layers with experts, experts per token), set with the states
    prompt_routed_experts: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    # One record per layer in `Request.lens`: the layer's predictions after each prompt token.
    lens: list[FlatLogprobs] | None = None

    @classmethod
    def for_request(cls, request: Request) -> RequestOutput:
        """Return a new output with one empty completion per sample."""
        return cls(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids.tolist(),
            outputs=[CompletionOutput(index=i) for i in range(request.params.num_samples)],
            params=request.params,
        )

    def __repr__(self) -> str:
        prompt = "" if self.prompt is None else f"{_short(self.prompt)}, "
        first = f"{self.outputs[0]!r}" if self.outputs else "no completion"
        more = f" and {len(self.outputs) - 1} more" if len(self.outputs) > 1 else ""
        return f"RequestOutput({prompt}{len(self.prompt_token_ids)} prompt tokens, {first}{more})"

    def _repr_html_(self) -> str | None:
        """Render the prompt and completions that have log-probabilities as HTML; None if there are none."""
        prompt = [] if self.prompt_logprobs is None else [self.prompt_logprobs]
        completions = [output.logprobs for output in self.outputs if output.logprobs is not None]
        texts = [shaded([*prompt, record], num_marked=1) for record in completions] or [shaded(prompt)]
        return "<hr>".join(texts) if prompt or completions else None

    def replayed_experts(self, index: int = 0) -> NDArray[Any]:
        """Return the experts of all tokens that were run for a completion, from the start of the prompt.

        The array, (positions, layers with experts, experts per token), is what
        `SamplingParams.routed_experts` takes: it has one position fewer than the prompt and the completion
        together, because the last token is not run.

        Raises:
            ParameterError: the request did not set `return_routed_experts`, or has not ended.
        """
        prompt, own = self.prompt_routed_experts, self.outputs[index].routed_experts
        require(prompt is not None, "return_routed_experts", "was not set, or the request has not ended")
        assert prompt is not None
        # The first of the completion's rows belongs to the last prompt token.
        return prompt if own is None else np.concatenate([prompt, own[1:]])

    @property
    def error(self) -> LogprobeError | None:
        """The first error among the completions, or None."""
        return next((output.error for output in self.outputs if output.error is not None), None)

    @property
    def is_finished(self) -> bool:
        """True once every completion has ended."""
        return all(completion.finish_reason is not None for completion in self.outputs)


def keep_best(output: RequestOutput, params: SamplingParams) -> None:
    """Reduce `best_of` completions to the `n` with the highest mean raw logprob, best first.

    Does nothing if `best_of` is not larger than `n`, or if a completion failed.
    """
    if params.picks_best and output.error is None:
        best = sorted(output.outputs, key=_mean_raw_logprob, reverse=True)[: params.n]
        for index, completion in enumerate(best):
            completion.index = index
        output.outputs = best


def _mean_raw_logprob(completion: CompletionOutput) -> float:
    if completion.raw_logprob is None:
        return -math.inf
    return completion.raw_logprob / len(completion.token_ids)


def end_with_error(output: RequestOutput, error: LogprobeError) -> None:
    """End every unfinished completion with `error`."""
    for completion in output.outputs:
        if completion.finish_reason is None:
            completion.error = error
            completion.finish_reason = "error"


class Admitting(Protocol):
    """The part of an engine that `Requests` needs."""

    def admit(self, request: Request) -> Admitted:
        """Validate a request.

        Raises:
            ParameterError: the request can never be served.
        """


class Requests:
    """Creates requests with unique ids and has the engine admit them."""

    def __init__(self, engine: Admitting, call: str = "", caller: str = "") -> None:
        self._engine, self._call, self._caller = engine, call, caller
        self._prefix = runtime.uuid4().hex[:12]
        self._numbers = itertools.count()

    def of_one_call(self, caller: str = "") -> Requests:
        """Return a factory whose requests count as one call by `caller` in fair sharing."""
        return Requests(self._engine, f"{self._prefix}-{next(self._numbers)}", caller)

    def admit(
        self,
        prompt_token_ids: IntArray,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        **more: Any,
    ) -> Admitted:
        """Create and validate a request, but do not start it; `more` are further fields of `Request`.

        Raises:
            ParameterError: the request can never be served.
        """
        more.setdefault("scored_as", _scored_as(params))
        request = Request(
            request_id=request_id or f"{self._prefix}-{next(self._numbers)}",
            prompt_token_ids=prompt_token_ids,
            params=params,
            call=self._call,
            caller=self._caller,
            **more,
        )
        return self._engine.admit(request)


def _scored_as(params: SamplingParams) -> SamplingParams | None:
    """Return the parameters under which prompt rows are scored; None: raw rows.

    Of a request's parameters, only the temperature applies to its prompt.
    """
    is_processed = params.prompt_logprobs is not None and params.logprobs_mode == "processed_logprobs"
    if not is_processed or params.temperature in {0, 1}:
        return None
    return SamplingParams(
        temperature=params.temperature,
        logprobs=params.prompt_logprobs,
        logprobs_mode="processed_logprobs",
        **extras_of(params),
    )


def check_request(request: Request, *, max_len: int, vocab_size: int) -> None:
    """Raise `ParameterError` if a request can never be served."""
    check_tokens(request.prompt_token_ids, request.params, max_len=max_len, vocab_size=vocab_size)
    if request.forced_token_ids is not None:
        _check_forced(request.forced_token_ids, len(request.prompt_token_ids), max_len, vocab_size)


def check_tokens(prompt: IntArray, params: SamplingParams, *, max_len: int, vocab_size: int) -> None:
    """Raise `ParameterError` if a prompt is empty or too long, or if a token id is out of range."""
    require(len(prompt) > 0, "prompt", "is empty; give at least one token, such as the model's BOS")
    _check_ids("prompt", prompt, vocab_size)
    # A prompt that is only scored may be one token longer: its last token is never run.
    limit = max_len if params.max_tokens else max_len + 1
    if len(prompt) > limit:
        raise PromptTooLongError(
            "prompt",
            f"has {len(prompt)} tokens, but at most {limit} fit into the model's context, max_model_len and "
            "the KV cache (kv_cache_memory_bytes); shorten it or score it in windows",
        )
    _check_named_ids(params, len(prompt), vocab_size)
    check_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)


def _check_forced(forced: IntArray, num_prompt: int, max_len: int, vocab_size: int) -> None:
    _check_ids("continuation", forced, vocab_size)
    num_tokens = num_prompt + len(forced)
    if num_tokens > max_len + 1:
        raise PromptTooLongError(
            "prompt",
            f"has {num_tokens} tokens with its continuation, but at most {max_len + 1} fit into the model's "
            "context, max_model_len and the KV cache (kv_cache_memory_bytes); shorten one of them or score "
            "in windows",
        )


def _check_named_ids(params: SamplingParams, num_prompt: int, vocab_size: int) -> None:
    name, ids = "logprob_token_ids", params.logprob_token_ids
    check_vocabulary(name, ids, vocab_size)
    if not isinstance(ids, IdLists):
        return
    if params.prompt_logprobs is None:
        fits = len(ids) <= params.max_tokens
        require(
            fits,
            name,
            f"has {len(ids)} lists, but at most {params.max_tokens} tokens are generated; raise max_tokens",
        )
        return
    is_whole = len(ids) == num_prompt
    require(is_whole, name, f"has {len(ids)} lists for {num_prompt} prompt tokens; give one per token")
    remedy = "must have an empty list for the first prompt token, which has no prediction"
    require(not len(ids[0]), name, remedy)


def check_vocabulary(name: str, ids: Sequence[Any] | IdLists | None, vocab_size: int) -> None:
    """Raise `ParameterError` if an id is outside the vocabulary."""
    if isinstance(ids, IdLists):
        _check_ids(name, ids.token_ids, vocab_size)
        return
    for token_id in ids or ():
        require(
            0 <= token_id < vocab_size, name, f"id {token_id} lies outside the vocabulary [0, {vocab_size})"
        )


def _check_ids(name: str, ids: NDArray[Any], vocab_size: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)][:1]
    if len(outside):  # format one id only, because NumPy formats arrays slowly
        raise ParameterError(name, f"token id {outside[0]} lies outside the vocabulary [0, {vocab_size})")
