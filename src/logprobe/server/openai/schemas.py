"""Types of replies after OpenAI's published specification, independent of the code that writes replies.

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
    """What went wrong, and at which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Shape, kw_only=True):
    """A reply other than 2xx."""

    error: Failure


class PromptTokensDetails(Shape, kw_only=True):
    """Prompt tokens that the prefix cache had, so that they were not computed again."""

    cached_tokens: int


class Usage(Shape, kw_only=True):
    """Tokens in and out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatTopLogprob(Shape, kw_only=True):
    """One candidate of a position; `bytes` are the token's own."""

    token: str
    logprob: Logprob
    bytes: Bytes


class ChatTokenLogprob(ChatTopLogprob, kw_only=True):
    """One token with its alternatives."""

    top_logprobs: list[ChatTopLogprob]


class TokenRow(ChatTopLogprob, kw_only=True):
    """One candidate, by id, with its rank where that is known."""

    token_id: int
    rank: int | None


class IdRow(Shape, kw_only=True):
    """One candidate of a prompt's position, which its id leads to."""

    logprob: Logprob
    rank: int
    decoded_token: str


class PromptRow(TokenRow, kw_only=True):
    """One token of a prompt."""

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
    """A value that a schema lets stand at a place of a reply."""

    value: Any
    logprob: Logprob
    share: float | None
    grammar_logprob: Logprob | UnsetType = UNSET
    grammar_share: float | UnsetType | None = UNSET


class RunnerUp(Shape, kw_only=True):
    """The likeliest member but the value."""

    value: Any
    share: float


class FieldLogprob(Shape, kw_only=True):
    """One value of a JSON text; nats."""

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


class _ChoiceExtras(Shape, kw_only=True):
    token_ids: Ids | UnsetType = UNSET
    explain: list[Any] | UnsetType = UNSET
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
    """Rows of a choice, or of what a chunk adds; the columns of each channel are parallel to its rows."""

    content: list[ChatTokenLogprob] | None
    refusal: list[ChatTokenLogprob] | None
    processed_content: list[ChatTokenLogprob] | UnsetType = UNSET
    reasoning: list[ChatTokenLogprob] | UnsetType = UNSET
    processed_reasoning: list[ChatTokenLogprob] | UnsetType = UNSET
    tool_calls: list[list[ChatTokenLogprob]] | UnsetType = UNSET
    processed_tool_calls: list[list[ChatTokenLogprob]] | UnsetType = UNSET


class CalledFunction(Shape, kw_only=True):
    """What is called; the arguments are the JSON text of an object."""

    name: str
    arguments: str


class ToolCall(Shape, kw_only=True):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallDelta(ToolCall, kw_only=True):
    """A call in a stream, whole."""

    index: int


class ChatMessage(Shape, kw_only=True):
    """What the assistant said; content is null where there are calls alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(_ChoiceExtras, kw_only=True):
    """One completion of a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(_ChatFrame, kw_only=True):
    """The reply of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Shape, kw_only=True):
    """What a chunk adds."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(_ChoiceExtras, kw_only=True):
    """An increment of one completion."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(_ChatFrame, kw_only=True):
    """One event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class LegacyRows(Shape, kw_only=True):
    """The other stage's numbers: the chosen token's, and a map of text to number a position."""

    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None]


class CompletionLogprobs(_FurtherColumns, kw_only=True):
    """OpenAI's parallel arrays, one entry a token."""

    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None]
    text_offset: list[int]
    processed: LegacyRows | UnsetType = UNSET


class CompletionChoice(_PromptExtras, kw_only=True):
    """One completion of a prompt, whole or an increment."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: Ids | UnsetType = UNSET
    explain: list[Any] | UnsetType = UNSET
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
    """Text with its rows."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]
    processed_logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    fields: list[FieldLogprob] | UnsetType | None = UNSET


class OutputMessage(Shape, kw_only=True, tag_field="type", tag="message"):
    """A text of a response."""

    id: str
    role: Literal["assistant"]
    status: str
    content: list[OutputText]


class ReasoningText(Shape, kw_only=True):
    """Reasoning with its rows, where they were asked for."""

    type: Literal["reasoning_text"]
    text: str
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    processed_logprobs: list[ChatTokenLogprob] | UnsetType = UNSET


class OutputReasoning(Shape, kw_only=True, tag_field="type", tag="reasoning"):
    """What a response thought before."""

    id: str
    status: str
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(Shape, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a tool."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    processed_logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    fields: list[FieldLogprob] | UnsetType | None = UNSET


class Item(msgspec.Struct, kw_only=True):
    """An item that a response answered; a message's other fields are those that it was given."""

    id: str
    type: Literal["message", "reasoning", "function_call", "function_call_output"]
    role: str | UnsetType = UNSET
    status: Literal["completed"]
    content: list[dict[str, Any]] | UnsetType = UNSET


class Items(Shape, kw_only=True):
    """A page of such items."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class IncompleteDetails(Shape, kw_only=True):
    """Why a response is not whole."""

    reason: str


class Response(msgspec.Struct, kw_only=True):
    """The reply of `/v1/responses`; it repeats more of what was asked than stands here."""

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


class Score(msgspec.Struct, kw_only=True):
    """What the model gives to one continuation, nats; more measures stand beside these."""

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


class Scores(Shape, kw_only=True):
    """The reply of `/v1/score`."""

    id: str
    object: Literal["score"]
    model: str
    unit: Literal["nats"]
    data: list[Score]
    usage: Usage
    logprobs_info: dict[str, Any] | UnsetType = UNSET


class _Answers(Shape, kw_only=True):
    id: str
    object: Literal["list"]
    created: int
    model: str
    unit: Literal["nats"]
    usage: Usage


class Classified(Shape, kw_only=True):
    """What the model gives each label of one prompt, in their order; null where none is possible."""

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


class Classifications(_Answers, kw_only=True):
    """The reply of `/v1/classify`."""

    data: list[Classified]


class Judged(Shape, kw_only=True):
    """The distribution of one prompt's grade, in the order of the scale; null where none is possible."""

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
    """An answer that was drawn; figures are of the model's own distribution unless their name says drawn."""

    text: str
    token_ids: Ids
    num_tokens: int
    logprob: float  # nats
    drawn_logprob: float  # nats
    logprob_per_token: float  # nats
    perplexity: float
    mean_token_entropy: float  # nats
    max_token_entropy: float  # nats
    lowest_group_confidence: float  # nats
    tail_confidence: float  # nats
    finish_reason: Literal["stop", "length", "abort"]
    stopped_early: bool


class Uncertain(Shape, kw_only=True):
    """The reply of `/v1/uncertainty`; figures are null where every answer was stopped early."""

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
    """A document that was ranked."""

    text: str


class Ranked(Shape, kw_only=True):
    """How relevant a document is; null where neither answer is possible."""

    index: int
    relevance_score: float | None
    document: RankedText | UnsetType = UNSET


class RankUsage(Shape, kw_only=True):
    """Tokens that were read."""

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
    """Whether a model is in memory."""

    value: Literal["loaded", "unloaded"]


class Model(Shape, kw_only=True):
    """A model, or weights of its own name on one; one that is not loaded says no more than its name."""

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
    """An object whose fields docs/api.md tells."""


REPLIES: Final[dict[str, type[msgspec.Struct]]] = {
    "POST /v1/chat/completions": ChatCompletion,
    "POST /v1/completions": Completion,
    "POST /v1/responses": Response,
    "GET /v1/responses/{response_id}": Response,
    "GET /v1/responses/{response_id}/input_items": Items,
    "POST /v1/score": Scores,
    "POST /v1/classify": Classifications,
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
