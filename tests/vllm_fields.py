"""vLLM's request fields of chat and text completions, each with a value that asks for something."""

from __future__ import annotations

from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BOTH: dict[str, Any] = {
    "model": "default",
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1},
    "max_tokens": 2,
    "n": 2,
    "presence_penalty": 0.5,
    "response_format": {"type": "json_object"},
    "seed": 1,
    "stop": ["z"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.5,
    "user": "a",
    "use_beam_search": True,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "watermarking": True,
    "length_penalty": 2.0,
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 1,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 3,
    "truncation_side": "right",
    "allowed_token_ids": [5, 6],
    "bad_words": ["a"],
    "prompt_logprobs": 1,
    "logprob_token_ids": [5],
    "add_special_tokens": True,
    "structured_outputs": {"choice": ["a", "b"]},
    "priority": 1,
    "request_id": "mine",
    "session_id": "mine",
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
    "routed_experts_prompt_start": 1,
    "return_token_offsets": True,
    "return_mm_kwargs": False,
    "cache_salt": "a",
    "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1},
    "repetition_detection": {"max_pattern_size": 3},
    "thinking_token_budget": 5,
    "stream_interval": 2,
    "echo": True,
}
FIELDS: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [{"role": "user", "content": "the cat"}],
        "logprobs": True,
        "top_logprobs": 2,
        "max_completion_tokens": 2,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "include_reasoning": False,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "documents": [{"text": "a"}],
        "chat_template": "{{ messages[0].content }}",
        "chat_template_kwargs": {"enable_thinking": False},
        "media_io_kwargs": {"image": {}},
        "mm_processor_kwargs": {"a": 1},
        "return_prompt_text": True,
        **BOTH,
    },
    COMPLETIONS: {
        "prompt": "the cat",
        "logprobs": 2,
        "suffix": "a",
        "prompt_embeds": "AAAA",
        **BOTH,
    },
}
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [TOOL], "max_tokens": 100},
    "parallel_tool_calls": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 100},
    "response_format": {"max_tokens": 100},
}
"""Fields that must accompany a field."""


def request_of(path: str, name: str) -> dict[str, Any]:
    """Return a body that sets a field."""
    body = {one: FIELDS[path][one] for one in ("messages", "prompt") if one in FIELDS[path]}
    beside = dict(BESIDE.get(name, {}))
    if name == "logprob_token_ids":
        beside = {"logprobs": FIELDS[path]["logprobs"]}
    return body | {"max_tokens": 2} | beside | {name: FIELDS[path][name]}
