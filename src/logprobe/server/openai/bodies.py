"""Typed request bodies and queries of the routes; `ignored_fields` handles unknown fields.

Names and meanings are OpenAI's; this server's extensions are in separate blocks. None means not given.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from logprobe.analysis.labels import SCALE

Ids = list[int]
NamedIds = list[int | Ids]  # ids for all positions, or a list per position
Prompts = str | list[str | int | Ids]  # one prompt as text or ids, or a list of either
Count = Annotated[int, Meta(ge=0)]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "both"]
FieldLogprobs = bool | Literal["members"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# OpenAI's bounds; replies repeat the metadata.
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a streamed reply."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Reasoning options of a response."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class RoutedExperts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Expert routes to replay: the experts of each token in each layer of a mixture-of-experts model."""

    shape: Annotated[list[Annotated[int, Meta(ge=1)]], Meta(min_length=3, max_length=3)]
    dtype: Literal["uint8", "uint16"]
    data: bytes  # base64 of the array in C order, little-endian


class GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Common fields of chat and text completions; those in `SamplingParams` mean the same there."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None

    # Extensions: sampling.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Ids | None = None
    allowed_token_ids: Ids | None = None
    bad_words: list[str] | None = None
    logits_processors_args: dict[str, Any] | None = None
    lora: str | None = None
    routed_experts: RoutedExperts | None = None
    # Extensions: tokenization of the prompt, and the text of special tokens.
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    skip_special_tokens: bool | None = None
    # Extensions: the end of the reply's id.
    request_id: str | None = None
    # Extensions: structured output in vLLM's parameters, instead of `response_format`.
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    # Extensions: each adds fields to the reply.
    logprobs_mode: LogprobsMode | None = None
    logprob_token_ids: NamedIds | None = None
    prompt_logprobs: int | None = None
    prompt_rows: bool | None = None
    entropy: bool | None = None
    varentropy: bool | None = None
    margin: bool | None = None
    explain: bool | None = None
    digest: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    field_logprobs: FieldLogprobs | None = None
    return_routed_experts: bool | None = None

    # Ignored here (`ignored_fields`), or accepted only with a value that has no effect.
    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    cache_prompt: bool | None = None
    guided_decoding_backend: str | None = None
    priority: int | None = None
    spaces_between_special_tokens: bool | None = None


GUIDED: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /v1/completions`."""

    prompt: Prompts
    suffix: str | None = None
    max_tokens: Count | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    response_format: dict[str, Any] | None = None


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    # Extensions: rendering of the chat template.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None

    # OpenAI's fields that are accepted only with a value that has no effect.
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    verbosity: str | None = None
    web_search_options: Any = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /detokenize`."""

    model: str | None = None
    tokens: Ids


class LoglikelihoodBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /v1/loglikelihood`: continuations of one context, to be scored."""

    continuations: Annotated[list[str | Ids], Meta(min_length=1)]
    context: str | Ids | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None
    unconditional: bool = False
    logprob_token_ids: list[NamedIds] | None = None  # for each continuation
    temperature: Annotated[float, Meta(gt=0)] | None = None  # of the scored distribution
    boundary: Literal["auto", "token"] = "auto"  # how to score a continuation if a token spans its start
    lora: str | None = None


class LabelTokensBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Common fields of vLLM's and SGLang's routes for probabilities of label tokens."""

    query: str | Ids
    label_token_ids: Annotated[Ids, Meta(min_length=1)]
    apply_softmax: bool
    item_first: bool = False
    model: str | None = None
    lora: str | None = None


class GenerativeScoringBody(LabelTokensBody, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /generative_scoring`, as in vLLM."""

    items: Annotated[list[str | Ids], Meta(min_length=1)]
    apply_softmax: bool = True
    add_special_tokens: bool = True
    request_id: str | None = None
    priority: int | None = None  # no effect


class TokenScoreBody(LabelTokensBody, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /v1/score`, as in SGLang."""

    items: str | Annotated[list[str | Ids], Meta(min_length=1)]
    apply_softmax: bool = False


class AnswersBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Common fields of the routes that score given answers."""

    input: str | list[str] | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    model: str | None = None
    lora: str | None = None
    user: str | None = None  # no effect


class LabelBody(AnswersBody, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /v1/label`: labels, each scored as a whole."""

    labels: list[str] | dict[str, str | list[str]]
    correction: Literal["none", "length", "calibrated"] = "none"
    content_free: str | Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    confidence: str | None = None  # name of a fit that the server has loaded

    @property
    def num_answers(self) -> int:
        """Number of texts of all labels."""
        texts = self.labels.values() if isinstance(self.labels, dict) else self.labels
        return sum(1 if isinstance(text, str) else len(text) for text in texts)


class JudgeBody(AnswersBody, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /v1/judge`: the scale of a grade."""

    scale: list[float] | None = None

    @property
    def num_answers(self) -> int:
        """Number of grades."""
        return len(SCALE) if self.scale is None else len(self.scale)


class UncertaintyBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /v1/uncertainty`: answers to sample and compare."""

    input: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    model: str | None = None
    lora: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 10
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    window: Annotated[int, Meta(ge=1)] | None = None
    k: Annotated[int, Meta(ge=1)] | None = None
    stop_below: Annotated[float, Meta(gt=0)] | None = None
    user: str | None = None  # no effect


class RerankDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A document to rank, as an object."""

    text: str


class RerankBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /v1/rerank`: a query and documents, in the format of Jina, Cohere and vLLM."""

    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1)]
    model: str | None = None
    top_n: Count | None = None  # 0: all
    return_documents: bool | None = None
    user: str | None = None  # no effect

    # Extensions: LoRA weights, and the prompt template of a pair.
    lora: str | None = None
    task: str | None = None
    template: Annotated[list[str], Meta(min_length=3, max_length=3)] | None = None
    labels: Annotated[list[str], Meta(min_length=2, max_length=2)] | None = None


class NextTokenBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /v1/next_token_logprobs`: prompts whose full next-token rows are returned."""

    prompts: Annotated[list[str | Ids], Meta(min_length=1)]
    stage: Literal["raw"] = "raw"
    dtype: Literal["float32", "float16"] = "float32"
    model: str | None = None
    lora: str | None = None


class HiddenStatesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /v1/hidden_states`: prompts whose hidden states are returned."""

    prompts: Annotated[list[str | Ids], Meta(min_length=1)]
    layers: Literal["last"] | Annotated[list[int], Meta(min_length=1)] = "last"
    model: str | None = None
    lora: str | None = None


class ResponsesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /v1/responses`."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: float | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None

    # Extensions, as in `GenerationBody`.
    seed: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    logits_processors_args: dict[str, Any] | None = None
    lora: str | None = None
    logprobs_mode: LogprobsMode | None = None
    field_logprobs: FieldLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None

    # OpenAI's fields that are accepted only with a value that has no effect.
    background: bool | None = None
    truncation: str | None = None
    max_tool_calls: int | None = None
    conversation: Any = None
    prompt: Any = None

    # Ignored here (`ignored_fields`).
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None


class LoadLoraBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /v1/load_lora_adapter`, as in vLLM."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    model: str | None = None  # None: the first model


class UnloadLoraBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /v1/unload_lora_adapter`, as in vLLM."""

    lora_name: str
    model: str | None = None


class UpdateWeightsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of `POST /update_weights_from_disk`, as in SGLang."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    model: str | None = None


ORDERS: Final = ("asc", "desc")
MAX_LISTED: Final = 100  # items per page

BODIES: Final[dict[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/loglikelihood": LoglikelihoodBody,
    "/v1/label": LabelBody,
    "/generative_scoring": GenerativeScoringBody,
    "/v1/score": TokenScoreBody,
    "/v1/judge": JudgeBody,
    "/v1/uncertainty": UncertaintyBody,
    "/v1/rerank": RerankBody,
    "/v2/rerank": RerankBody,
    "/rerank": RerankBody,
    "/v1/next_token_logprobs": NextTokenBody,
    "/v1/hidden_states": HiddenStatesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/tokenize": TokenizeBody,
    "/v1/detokenize": DetokenizeBody,
    "/v1/load_lora_adapter": LoadLoraBody,
    "/v1/unload_lora_adapter": UnloadLoraBody,
    "/update_weights_from_disk": UpdateWeightsBody,
}
NESTED: Final[dict[str, type[msgspec.Struct]]] = {
    "stream_options": StreamOptions,
    "reasoning": Reasoning,
    "routed_experts": RoutedExperts,
    "documents": RerankDocument,
}
"""Body field → type of its object, or of the objects in its list."""
QUERIES: Final[dict[str, tuple[dict[str, Any], ...]]] = {
    "/v1/responses/{response_id}/input_items": (
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}},
        {"name": "order", "in": "query", "schema": {"enum": list(ORDERS)}},
        {"name": "after", "in": "query", "schema": {"type": "string"}},
    ),
    **dict.fromkeys(
        (
            "/v1/capabilities",
            "/v1/logits_processors",
            "/v1/tokenizer",
            "/v1/tokenizer_info",
            "/tokenizer_info",
        ),
        ({"name": "model", "in": "query", "schema": {"type": "string"}},),  # selects one of several models
    ),
}
