"""Shapes of the replies as JSON Schema, after OpenAI's published specification.

Before it: nothing. After it: the OpenAPI document, and the tests, which hold every reply against them.
"""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

STRING: Final[Schema] = {"type": "string"}
INTEGER: Final[Schema] = {"type": "integer"}
NUMBER: Final[Schema] = {"type": "number"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
ANY: Final[Schema] = {}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _maybe(of: Schema) -> Schema:
    return {"anyOf": [of, {"type": "null"}]}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None, *, more: bool) -> Schema:
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": more,
    }


_LOGPROB: Final[Schema] = {"type": "number", "maximum": 1e-4, "minimum": -9999.0}
_BYTES: Final = _list({"type": "integer", "minimum": 0, "maximum": 255})
_TOP: Final = {"token": STRING, "logprob": _LOGPROB, "bytes": _BYTES}
_GIVEN: Final = _list(_maybe(_list(_ref("TokenRow"))))
_BESIDE: Final = {"entropy": _list(_maybe(NUMBER)), "given": _GIVEN}
_CHOICE_EXTRAS: Final = {"token_ids": _list(INTEGER), "explain": _list(ANY)}
_PROMPT_EXTRAS: Final = {
    "prompt_token_ids": _list(INTEGER),
    "prompt_logprobs": _list(_maybe(_ref("PromptRow"))),
    "prompt_entropy": _list(_maybe(NUMBER)),
    "prompt_given": _GIVEN,
    "logprobs_info": {"type": "object"},
}
_FINISH: Final[Schema] = {"enum": ["stop", "length"]}
_MODEL: Final = {"id": STRING, "object": {"const": "model"}, "created": INTEGER, "owned_by": STRING}
_FRAME: Final = {"id": STRING, "created": INTEGER, "model": STRING}
_LEGACY_ROWS: Final = {
    "token_logprobs": _list(_maybe(_LOGPROB)),
    "top_logprobs": _list(_maybe({"type": "object", "additionalProperties": _LOGPROB})),
}
_RESPONSE_PART: Final = _object(
    {
        "type": {"const": "output_text"},
        "text": STRING,
        "annotations": _list(ANY),
        "logprobs": _list(_ref("ChatTokenLogprob")),
    },
    more=False,
)

COMPONENTS: Final[dict[str, Schema]] = {
    "Error": _object(
        {
            "error": _object(
                {"message": STRING, "type": STRING, "param": _maybe(STRING), "code": _maybe(STRING)},
                more=False,
            )
        },
        more=False,
    ),
    "Usage": _object(
        {"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER}, more=False
    ),
    "ChatTopLogprob": _object(_TOP, more=False),
    "ChatTokenLogprob": _object({**_TOP, "top_logprobs": _list(_ref("ChatTopLogprob"))}, more=False),
    "ChatLogprobs": _object(
        {
            "content": _maybe(_list(_ref("ChatTokenLogprob"))),
            "refusal": _maybe(_list(_ref("ChatTokenLogprob"))),
        },
        {"processed_content": _list(_ref("ChatTokenLogprob")), **_BESIDE},
        more=False,
    ),
    "TokenRow": _object({"token_id": INTEGER, **_TOP, "rank": _maybe(INTEGER)}, more=False),
    "PromptRow": _object(
        {"token_id": INTEGER, **_TOP, "rank": _maybe(INTEGER), "top_logprobs": _list(_ref("TokenRow"))},
        more=False,
    ),
    "ChatCompletion": _object(
        {
            **_FRAME,
            "object": {"const": "chat.completion"},
            "choices": _list(
                _object(
                    {
                        "index": INTEGER,
                        "message": _object(
                            {"role": {"const": "assistant"}, "content": STRING, "refusal": _maybe(STRING)},
                            more=False,
                        ),
                        "logprobs": _maybe(_ref("ChatLogprobs")),
                        "finish_reason": _FINISH,
                    },
                    _CHOICE_EXTRAS,
                    more=False,
                )
            ),
            "usage": _ref("Usage"),
        },
        _PROMPT_EXTRAS,
        more=False,
    ),
    "ChatCompletionChunk": _object(
        {
            **_FRAME,
            "object": {"const": "chat.completion.chunk"},
            "choices": _list(
                _object(
                    {
                        "index": INTEGER,
                        "delta": _object({}, {"role": STRING, "content": STRING}, more=False),
                        "logprobs": _maybe(_ref("ChatLogprobs")),
                        "finish_reason": _maybe(_FINISH),
                    },
                    _CHOICE_EXTRAS,
                    more=False,
                )
            ),
        },
        {"usage": _maybe(_ref("Usage")), **_PROMPT_EXTRAS},
        more=False,
    ),
    "CompletionLogprobs": _object(
        {"tokens": _list(STRING), **_LEGACY_ROWS, "text_offset": _list(INTEGER)},
        {"processed": _object(_LEGACY_ROWS, more=False), **_BESIDE},
        more=False,
    ),
    "Completion": _object(
        {
            **_FRAME,
            "object": {"const": "text_completion"},
            "choices": _list(
                _object(
                    {
                        "index": INTEGER,
                        "text": STRING,
                        "logprobs": _maybe(_ref("CompletionLogprobs")),
                        "finish_reason": _maybe(_FINISH),
                    },
                    _CHOICE_EXTRAS | _PROMPT_EXTRAS,
                    more=False,
                )
            ),
        },
        {"usage": _maybe(_ref("Usage"))},
        more=False,
    ),
    "Response": _object(
        {
            "id": STRING,
            "object": {"const": "response"},
            "created_at": INTEGER,
            "status": {"enum": ["completed", "incomplete", "in_progress"]},
            "error": {"type": "null"},
            "incomplete_details": _maybe(_object({"reason": STRING}, more=False)),
            "instructions": _maybe(STRING),
            "metadata": {"type": "object"},
            "model": STRING,
            "output": _list(
                _object(
                    {
                        "id": STRING,
                        "type": {"const": "message"},
                        "role": {"const": "assistant"},
                        "status": STRING,
                        "content": _list(_RESPONSE_PART),
                    },
                    more=False,
                )
            ),
            "parallel_tool_calls": BOOLEAN,
            "temperature": NUMBER,
            "tool_choice": STRING,
            "tools": _list(ANY),
            "top_logprobs": INTEGER,
            "top_p": NUMBER,
            "usage": _maybe({"type": "object"}),
        },
        more=True,
    ),
    "Scores": _object(
        {
            "id": STRING,
            "object": {"const": "score"},
            "model": STRING,
            "unit": {"const": "nats"},
            "data": _list(
                _object(
                    {
                        "index": INTEGER,
                        "logprob": NUMBER,
                        "is_greedy": BOOLEAN,
                        "num_tokens": INTEGER,
                        "token_ids": _list(INTEGER),
                        "token_logprobs": _list(_LOGPROB),
                    },
                    more=True,
                )
            ),
            "usage": _ref("Usage"),
        },
        more=False,
    ),
    "Model": _object(_MODEL, {"max_model_len": INTEGER, "root": STRING, "parent": STRING}, more=False),
    "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}, more=False),
    "Tokens": _object(
        {"tokens": _list(INTEGER), "count": INTEGER, "max_model_len": INTEGER},
        {"token_strs": _list(STRING)},
        more=False,
    ),
    "Text": _object({"prompt": STRING}, more=False),
    "Facts": {"type": "object"},
}

_REPLIES: Final = {
    "POST /v1/chat/completions": "ChatCompletion",
    "POST /v1/completions": "Completion",
    "POST /v1/responses": "Response",
    "GET /v1/responses/{response_id}": "Response",
    "POST /v1/score": "Scores",
    "GET /v1/models": "Models",
    "GET /v1/models/{model}": "Model",
    "POST /tokenize": "Tokens",
    "POST /v1/tokenize": "Tokens",
    "POST /detokenize": "Text",
    "POST /v1/detokenize": "Text",
}
_STREAMED: Final = {"/v1/chat/completions", "/v1/completions", "/v1/responses"}


def contents(method: str, path: str) -> dict[str, Any]:
    """What a route answers, by media type."""
    if path == "/metrics":
        return {"text/plain": {"schema": STRING}}
    if path == "/v1/next_token_logprobs":
        return {"application/vnd.safetensors": {"schema": {"type": "string", "format": "binary"}}}
    name = _REPLIES.get(f"{method} {path}", "Facts")
    found: dict[str, Any] = {"application/json": {"schema": _ref(name)}}
    if method == "POST" and path in _STREAMED:
        found["text/event-stream"] = {"schema": STRING}
    if path == "/v1/score":
        media = "application/vnd.apache.arrow.stream"
        found[media] = {"schema": {"type": "string", "format": "binary"}}
    return found
