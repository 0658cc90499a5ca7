"""Types of replies, following OpenAI's published specification; not used by the code that writes replies.

They are the schemas of the OpenAPI document, and tests validate every reply against them. A field that is
UNSET by default appears in a reply only if the request asks for it.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from logprobe.records.forms.finite import IMPOSSIBLE

Logprob = Annotated[float, Meta(ge=IMPOSSIBLE, le=1e-4)]  # nats
Bytes: TypeAlias = list[Annotated[int, Meta(ge=0, le=255)]]
Ids: TypeAlias = list[int]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class Shape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object with these fields and no others."""


class Failure(Shape, kw_only=True):
    """An error message and the request field that it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Shape, kw_only=True):
    """Body of every reply with a status other than 2xx."""

    error: Failure


class PromptTokensDetails(Shape, kw_only=True):
    """Number of prompt tokens found in the prefix cache."""

    cached_tokens: int


class Usage(Shape, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatTopLogprob(Shape, kw_only=True):
    """A candidate token at a position; `bytes` are the exact bytes of the token."""

    token: str
    logprob: Logprob
    bytes: Bytes


class ChatTokenLogprob(ChatTopLogprob, kw_only=True):
    """A token with its alternatives."""

    top_logprobs: list[ChatTopLogprob]


class TokenRow(ChatTopLogprob, kw_only=True):
    """A candidate token with its id, and its rank if known."""

    token_id: int
    rank: int | None


class IdRow(Shape, kw_only=True):
    """A candidate token at a prompt position; its key in the JSON object is the token id."""

    logprob: Logprob
    rank: int
    decoded_token: str


class PromptRow(TokenRow, kw_only=True):
    """A prompt token with its alternatives."""

    top_logprobs: list[TokenRow]


class _FurtherColumns(Shape, kw_only=True):
    log_kept_mass: list[float | None] | UnsetType = UNSET
    entropy: list[float | None] | UnsetType = UNSET
    varentropy: list[float | None] | UnsetType = UNSET
    margin: list[float | None] | UnsetType = UNSET
    given: list[list[TokenRow] | None] | UnsetType = UNSET


class _PromptExtras(Shape, kw_only=True):
    prompt_token_ids: Ids | UnsetType = UNSET
    prompt_logprobs: list[dict[str, IdRow] | None] | UnsetType = UNSET
    prompt_rows: list[PromptRow | None] | UnsetType = UNSET
    prompt_log_kept_mass: list[float | None] | UnsetType = UNSET
    prompt_entropy: list[float | None] | UnsetType = UNSET
    prompt_varentropy: list[float | None] | UnsetType = UNSET
    prompt_margin: list[float | None] | UnsetType = UNSET
    prompt_given: list[list[TokenRow] | None] | UnsetType = UNSET
    logprobs_info: dict[str, Any] | UnsetType = UNSET


class Member(Shape, kw_only=True):
    """A value that the schema allows for a field."""

    value: Any
    logprob: Logprob
    share: float | None
    grammar_logprob: Logprob | UnsetType = UNSET
    grammar_share: float | UnsetType | None = UNSET


class RunnerUp(Shape, kw_only=True):
    """The most likely member other than the value of the field."""

    value: Any
    share: float


class FieldLogprob(Shape, kw_only=True):
    """A value of a JSON text with its log-probability (nats)."""

    pointer: str
    value: str | float | bool | UnsetType | None = UNSET
    logprob: Logprob
    upper: Logprob
    tokens: list[int]
    least_sure: int | None
    processed_logprob: Logprob | UnsetType = UNSET
    processed_upper: Logprob | UnsetType = UNSET
    runner_up: RunnerUp | UnsetType | None = UNSET
    members: list[Member] | UnsetType | None = UNSET
    rest: float | UnsetType = UNSET
    unresolved: float | UnsetType = UNSET
    grammar_unresolved: float | UnsetType = UNSET


class ExpertRoutes(Shape, kw_only=True):
    """Experts of each token in each layer: an array in C order, little-endian, as base64."""

    shape: list[int]
    dtype: Literal["uint8", "uint16"]
    data: str


class _ChoiceExtras(Shape, kw_only=True):
    token_ids: Ids | UnsetType = UNSET
    routed_experts: ExpertRoutes | UnsetType = UNSET
    explain: list[Any] | UnsetType = UNSET
    digests: list[str] | UnsetType = UNSET  # hexadecimal
    fields: list[FieldLogprob] | UnsetType | None = UNSET
    tool_call_fields: list[list[FieldLogprob] | None] | UnsetType = UNSET


class _ChatFrame(_PromptExtras, kw_only=True):
    id: str
    created: int
    model: str


class _ReasoningColumns(_FurtherColumns, kw_only=True):
    reasoning_log_kept_mass: list[float | None] | UnsetType = UNSET
    reasoning_entropy: list[float | None] | UnsetType = UNSET
    reasoning_varentropy: list[float | None] | UnsetType = UNSET
    reasoning_margin: list[float | None] | UnsetType = UNSET
    reasoning_given: list[list[TokenRow] | None] | UnsetType = UNSET


class _CallColumns(_ReasoningColumns, kw_only=True):
    tool_calls_log_kept_mass: list[list[float | None]] | UnsetType = UNSET
    tool_calls_entropy: list[list[float | None]] | UnsetType = UNSET
    tool_calls_varentropy: list[list[float | None]] | UnsetType = UNSET
    tool_calls_margin: list[list[float | None]] | UnsetType = UNSET
    tool_calls_given: list[list[list[TokenRow] | None]] | UnsetType = UNSET


class ChatLogprobs(_CallColumns, kw_only=True):
    """Rows of a choice or of a chunk; the columns of a channel are parallel to that channel's rows."""

    content: list[ChatTokenLogprob] | None
    refusal: list[ChatTokenLogprob] | None
    processed_content: list[ChatTokenLogprob] | UnsetType = UNSET
    reasoning: list[ChatTokenLogprob] | UnsetType = UNSET
    processed_reasoning: list[ChatTokenLogprob] | UnsetType = UNSET
    tool_calls: list[list[ChatTokenLogprob]] | UnsetType = UNSET
    processed_tool_calls: list[list[ChatTokenLogprob]] | UnsetType = UNSET


class CalledFunction(Shape, kw_only=True):
    """A function call; the arguments are a JSON object as text."""

    name: str
    arguments: str


class ToolCall(Shape, kw_only=True):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallDelta(ToolCall, kw_only=True):
    """A tool call in a stream; it is always complete."""

    index: int


class ChatMessage(Shape, kw_only=True):
    """The assistant's message; `content` is null if the message has only tool calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(_ChoiceExtras, kw_only=True):
    """A choice of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None


class ChatCompletion(_ChatFrame, kw_only=True):
    """The reply of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Shape, kw_only=True):
    """The part of the message that a chunk adds."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(_ChoiceExtras, kw_only=True):
    """A choice of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatCompletionChunk(_ChatFrame, kw_only=True):
    """An event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class LegacyRows(Shape, kw_only=True):
    """Log-probabilities from the processed distribution, in the format of `CompletionLogprobs`."""

    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None]


class CompletionLogprobs(_FurtherColumns, kw_only=True):
    """OpenAI's parallel arrays, one entry per token."""

    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None]
    text_offset: list[int]
    ranks: list[int] | UnsetType = UNSET
    processed: LegacyRows | UnsetType = UNSET


class CompletionChoice(_PromptExtras, kw_only=True):
    """A choice of a text completion or of one of its chunks."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: Ids | UnsetType = UNSET
    routed_experts: ExpertRoutes | UnsetType = UNSET
    explain: list[Any] | UnsetType = UNSET
    digests: list[str] | UnsetType = UNSET  # hexadecimal
    fields: list[FieldLogprob] | UnsetType | None = UNSET


class Completion(Shape, kw_only=True):
    """The reply of `/v1/completions`, and each event of its stream."""

    id: str
    created: int
    model: str
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class OutputText(Shape, kw_only=True):
    """Output text with its rows."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]
    processed_logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    fields: list[FieldLogprob] | UnsetType | None = UNSET


class OutputMessage(Shape, kw_only=True, tag_field="type", tag="message"):
    """An output message."""

    id: str
    role: Literal["assistant"]
    status: str
    content: list[OutputText]


class ReasoningText(Shape, kw_only=True):
    """Reasoning text, with its rows if requested."""

    type: Literal["reasoning_text"]
    text: str
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    processed_logprobs: list[ChatTokenLogprob] | UnsetType = UNSET


class OutputReasoning(Shape, kw_only=True, tag_field="type", tag="reasoning"):
    """A reasoning item."""

    id: str
    status: str
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(Shape, kw_only=True, tag_field="type", tag="function_call"):
    """A function call item."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    processed_logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    fields: list[FieldLogprob] | UnsetType | None = UNSET


class Item(msgspec.Struct, kw_only=True):
    """An input item of a response; an item of type `message` has further fields from the request."""

    id: str
    type: Literal["message", "reasoning", "function_call", "function_call_output"]
    role: str | UnsetType = UNSET
    status: Literal["completed"]
    content: list[dict[str, Any]] | UnsetType = UNSET


class Items(Shape, kw_only=True):
    """A page of input items."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class IncompleteDetails(Shape, kw_only=True):
    """The reason why a response is incomplete."""

    reason: str


class Response(msgspec.Struct, kw_only=True):
    """The reply of `/v1/responses`; it repeats further fields of the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    temperature: float
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_logprobs: int
    top_p: float
    usage: dict[str, Any] | None
    logprobs_info: dict[str, Any] | UnsetType = UNSET


class Loglikelihood(msgspec.Struct, kw_only=True):
    """Log-probability of a continuation (nats), with further measures."""

    index: int
    logprob: float
    boundary: Literal["token", "bytes"]  # `logprob` is the sum over tokens, or the byte log-probability
    is_greedy: bool
    num_tokens: int
    token_ids: Ids
    token_logprobs: list[Logprob]
    given_ids: list[Ids] | UnsetType = UNSET
    given_logprobs: list[list[Logprob]] | UnsetType = UNSET
    given_ranks: list[Ids] | UnsetType = UNSET


class Loglikelihoods(Shape, kw_only=True):
    """The reply of `/v1/loglikelihood`."""

    id: str
    object: Literal["loglikelihood"]
    model: str
    unit: Literal["nats"]
    data: list[Loglikelihood]
    usage: Usage
    logprobs_info: dict[str, Any] | UnsetType = UNSET


class LabelTokenScore(Shape, kw_only=True):
    """Probability of the first label token after one item; null if no label is possible."""

    index: int
    object: Literal["score"]
    score: float | None


class GenerativeScores(Shape, kw_only=True):
    """The reply of `/generative_scoring`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[LabelTokenScore]
    usage: Usage


class TokenScores(Shape, kw_only=True):
    """The reply of `/v1/score`: for each item, the probabilities in the order of `label_token_ids`."""

    scores: list[list[float | None]]
    model: str
    usage: Usage
    object: Literal["scoring"]


class _Answers(Shape, kw_only=True):
    id: str
    object: Literal["list"]
    created: int
    model: str
    unit: Literal["nats"]
    usage: Usage


class FittedLabels(Shape, kw_only=True):
    """Fitted probabilities of the labels of one prompt, in the order of `labels`."""

    label: str
    probability: float
    probs: list[float]
    label_set: list[str]


class Labelled(Shape, kw_only=True):
    """Scores of one prompt's labels, in the order of `labels`.

    `probs` and `margin` are null if no label is possible.
    """

    index: int
    label: str
    labels: list[str]
    num_classes: int
    probs: list[float | None]
    logprobs: list[float]  # nats
    corrected: list[float | None]  # nats
    mass: float
    margin: float | None  # nats
    boundary: Literal["token", "bytes"]  # labels are scored as tokens, or as bytes
    confidence: FittedLabels | UnsetType = UNSET


class Labels(_Answers, kw_only=True):
    """The reply of `/v1/label`."""

    data: list[Labelled]


class Judged(Shape, kw_only=True):
    """Distribution of a prompt's grade, in the order of `scale`.

    `probs`, `expectation` and `spread` are null if no grade is possible.
    """

    index: int
    expectation: float | None
    spread: float | None
    off_scale: float
    scale: list[float]
    probs: list[float | None]
    logprobs: list[float]  # nats
    boundary: Literal["token", "bytes"]  # as for labels


class Judgements(_Answers, kw_only=True):
    """The reply of `/v1/judge`."""

    data: list[Judged]


class DrawnAnswer(Shape, kw_only=True):
    """A sampled answer; values are from the model's raw distribution, except `drawn_logprob`."""

    text: str
    token_ids: Ids
    num_tokens: int
    logprob: float  # nats
    drawn_logprob: float  # nats
    mean_logprob: float  # nats
    perplexity: float
    mean_token_entropy: float  # nats
    max_token_entropy: float  # nats
    lowest_group_confidence: float  # nats
    tail_confidence: float  # nats
    finish_reason: Literal["stop", "length", "abort"]
    stopped_early: bool


class Uncertain(Shape, kw_only=True):
    """The reply of `/v1/uncertainty`; values are null if every answer was stopped early."""

    id: str
    object: Literal["uncertainty"]
    created: int
    model: str
    unit: Literal["nats"]
    best: str | None
    num_semantic_sets: int
    mass: float
    share: float | None
    semantic_entropy: float | None  # nats
    discrete_semantic_entropy: float | None  # nats
    monte_carlo_semantic_entropy: float | None  # nats
    monte_carlo_sequence_entropy: float | None  # nats
    monte_carlo_normalized_sequence_entropy: float | None  # nats
    k: int
    shares: list[float]
    semantic_sets: list[list[int]]
    answers: list[DrawnAnswer]
    usage: Usage


class RankedText(Shape, kw_only=True):
    """The text of a ranked document."""

    text: str


class Ranked(Shape, kw_only=True):
    """Relevance of a document, in [0, 1]; null if neither label (by default yes or no) is possible."""

    index: int
    relevance_score: float | None
    document: RankedText | UnsetType = UNSET


class RankUsage(Shape, kw_only=True):
    """Token counts of a ranking."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Ranking(Shape, kw_only=True):
    """The reply of `/v1/rerank`, the most relevant document first."""

    id: str
    model: str
    usage: RankUsage
    results: list[Ranked]


class ModelStatus(Shape, kw_only=True):
    """Loading state of a model."""

    value: Literal["loaded", "unloaded"]


class Model(Shape, kw_only=True):
    """A model or LoRA weights; the entry of an unloaded model has none of the optional fields."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    status: ModelStatus
    max_model_len: int | UnsetType = UNSET
    weight_version: str | UnsetType | None = UNSET
    quantization: str | UnsetType | None = UNSET
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET


class Models(Shape, kw_only=True):
    """The reply of `/v1/models`."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Shape, kw_only=True):
    """The reply of `/tokenize`."""

    tokens: Ids
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class Text(Shape, kw_only=True):
    """The reply of `/detokenize`."""

    prompt: str


class Facts(msgspec.Struct):
    """A JSON object; docs/api.md describes its fields."""


REPLIES: Final[dict[str, type[msgspec.Struct]]] = {
    "POST /v1/chat/completions": ChatCompletion,
    "POST /v1/completions": Completion,
    "POST /v1/responses": Response,
    "GET /v1/responses/{response_id}": Response,
    "GET /v1/responses/{response_id}/input_items": Items,
    "POST /v1/loglikelihood": Loglikelihoods,
    "POST /v1/label": Labels,
    "POST /generative_scoring": GenerativeScores,
    "POST /v1/score": TokenScores,
    "POST /v1/judge": Judgements,
    "POST /v1/uncertainty": Uncertain,
    "POST /v1/rerank": Ranking,
    "POST /v2/rerank": Ranking,
    "POST /rerank": Ranking,
    "GET /v1/models": Models,
    "GET /v1/models/{model}": Model,
    "POST /tokenize": Tokens,
    "POST /v1/tokenize": Tokens,
    "POST /detokenize": Text,
    "POST /v1/detokenize": Text,
}
"""Route → type of its JSON reply; all other JSON routes reply with `Facts`."""
