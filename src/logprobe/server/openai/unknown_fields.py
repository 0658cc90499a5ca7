"""Unknown fields of request bodies: which are refused, and which are ignored by name.

Refused are a misspelt field, a field of another route, and a field of another server that would change the
reply: ignoring one of these would give other numbers than were asked for. Any other unknown field is ignored,
named in the reply's `Warning` header and counted. What a client wrote is shown shortened and in plain ASCII.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from logprobe.errors import MAX_NAME_CHARS, shortened
from logprobe.server.http.errors import bad_request
from logprobe.server.openai.bodies import BODIES, NESTED
from logprobe.server.openai.no_effect import NO_EFFECT

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from logprobe.server.http.errors import ApiError

MAX_UNKNOWN: Final = 32  # of a body: each is compared with every known name
MAX_NAMED: Final = 8  # in a header
MAX_EDITS: Final = 2
CHARS_AN_EDIT: Final = 3  # a name may differ by one edit for so many of its characters


class Foreign(NamedTuple):
    """A field of another server that would change the reply."""

    ours: tuple[str, ...] = ()  # our names for it; the first that the body has is suggested
    neutral: tuple[Any, ...] = ()  # values that ask for nothing, with which it is ignored
    remedy: str = "leave it out"  # where no name of ours fits


OFF: Final[tuple[Any, ...]] = (False, "", [], {})  # and 0, which equals False
MAX_TOKENS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
LOGPROBS: Final = ("top_logprobs", "logprobs")
FORM: Final = ("structured_outputs", "text")
PROMPT: Final = ("prompt", "messages", "input")
THINKING: Final = ("enable_thinking", "reasoning_effort", "reasoning")
PROCESSORS: Final = ("logits_processors_args",)
TRUNCATION: Final = "shorten the text; POST /tokenize counts its tokens"
TOP_LEVEL: Final = "send its members as fields of the body"
CONTEXT: Final = "the operator sets the context, by --max-model-len"

FOREIGN: Final[dict[str, Foreign]] = {
    # Sampling, under other names.
    "beam_width": Foreign(neutral=(1,)),
    "ban_eos_token": Foreign(("ignore_eos",), OFF),
    "bad_words_ids": Foreign(("bad_words",), OFF),
    "custom_token_bans": Foreign(("bad_words",), OFF),
    "do_sample": Foreign(("temperature",), (True,)),
    "freq_penalty": Foreign(("frequency_penalty",), OFF),
    "max_gen_len": Foreign(MAX_TOKENS),
    "max_completion_tokens": Foreign(MAX_TOKENS),
    "max_length": Foreign(MAX_TOKENS),
    "max_new_tokens": Foreign(MAX_TOKENS),
    "max_output_tokens": Foreign(MAX_TOKENS),
    "max_tokens": Foreign(MAX_TOKENS),
    "max_tokens_to_sample": Foreign(MAX_TOKENS),
    "min_length": Foreign(("min_tokens",), OFF),
    "min_new_tokens": Foreign(("min_tokens",), OFF),
    "n_predict": Foreign(MAX_TOKENS),
    "no_stop_trim": Foreign(("include_stop_str_in_output",), OFF),
    "num_predict": Foreign(MAX_TOKENS),
    "num_return_sequences": Foreign(("n",), (1,)),
    "pres_penalty": Foreign(("presence_penalty",), OFF),
    "random_seed": Foreign(("seed",)),
    "sampling_seed": Foreign(("seed",)),
    "rep_pen": Foreign(("repetition_penalty",), (1,)),
    "repeat_penalty": Foreign(("repetition_penalty",), (1,)),
    "sampler_seed": Foreign(("seed",), (-1,)),
    "sequence_bias": Foreign(("logit_bias",), OFF),
    "stop_sequence": Foreign(("stop",), OFF),
    "stop_sequences": Foreign(("stop",), OFF),
    "stop_strings": Foreign(("stop",), OFF),
    "stop_words": Foreign(("stop",), OFF),
    "suppress_tokens": Foreign(("logit_bias",), OFF),
    "temp": Foreign(("temperature",)),
    # Sampling that this server does not do.
    "diversity_penalty": Foreign(neutral=OFF),
    "dry_multiplier": Foreign(neutral=OFF),
    "dynamic_temperature": Foreign(neutral=OFF),
    "dynatemp_range": Foreign(neutral=OFF),
    "early_stopping": Foreign(neutral=OFF),
    "encoder_repetition_penalty": Foreign(neutral=(1,)),
    "epsilon_cutoff": Foreign(neutral=OFF),
    "eta_cutoff": Foreign(neutral=OFF),
    "guidance_scale": Foreign(neutral=(1,)),
    "length_penalty": Foreign(neutral=(1,)),
    "min_keep": Foreign(neutral=(0, 1)),
    "mirostat": Foreign(neutral=OFF),
    "mirostat_mode": Foreign(neutral=OFF),
    "negative_prompt": Foreign(neutral=OFF),
    "no_repeat_ngram_size": Foreign(neutral=OFF),
    "num_beams": Foreign(neutral=(1,)),
    "penalty_alpha": Foreign(neutral=OFF),
    "repeat_last_n": Foreign(neutral=(-1,), remedy="repetition_penalty counts the whole text; leave it out"),
    "samplers": Foreign(),
    "smoothing_factor": Foreign(neutral=OFF),
    "tfs": Foreign(neutral=(1,)),
    "tfs_z": Foreign(neutral=(1,)),
    "top_a": Foreign(neutral=OFF),
    "top_n_sigma": Foreign(neutral=(-1, 0)),
    "typical": Foreign(neutral=(1,)),
    "typical_p": Foreign(neutral=(1,)),
    "use_beam_search": Foreign(neutral=OFF),
    "watermark": Foreign(neutral=OFF),
    "xtc_probability": Foreign(neutral=OFF),
    # Log-probabilities.
    "decoder_input_details": Foreign(("prompt_logprobs",), OFF),
    "logprob_start_len": Foreign(("prompt_logprobs",), (-1,)),
    "n_probs": Foreign(LOGPROBS, OFF),
    "num_logprobs": Foreign(LOGPROBS, OFF),
    "post_sampling_probs": Foreign(("logprobs_mode",), OFF),
    "return_logprob": Foreign(("logprobs", "top_logprobs"), OFF),
    "self_certainty": Foreign(neutral=OFF, remedy="it reads whole rows; ask in Python, or leave it out"),
    "token_ids_logprob": Foreign(("logprob_token_ids",), OFF),
    "top_logprobs_num": Foreign(LOGPROBS, OFF),
    "top_n_tokens": Foreign(LOGPROBS, OFF),
    # The form of the text, processors, weights.
    "adapter_id": Foreign(("lora",), OFF),
    "custom_logit_processor": Foreign(PROCESSORS, OFF),
    "custom_params": Foreign(PROCESSORS, OFF),
    "ebnf": Foreign(FORM, OFF),
    "extra_args": Foreign(PROCESSORS, OFF),
    "format": Foreign(("response_format", "text"), OFF),
    "grammar": Foreign(FORM, OFF),
    "guided_decoding": Foreign(FORM, OFF),
    "guided_json_object": Foreign(("response_format", "text"), OFF),
    "guided_whitespace_pattern": Foreign(neutral=OFF),
    "json_schema": Foreign(("response_format", "text"), OFF),
    "logits_processors": Foreign(PROCESSORS, OFF),
    "lora_adapters": Foreign(("lora",), OFF),
    "lora_path": Foreign(("lora",), OFF),
    "lora_request": Foreign(("lora",), OFF),
    "regex": Foreign(FORM, OFF),
    "response_schema": Foreign(("response_format", "text"), OFF),
    "schema": Foreign(("response_format", "text"), OFF),
    "stop_regex": Foreign(("stop",), OFF),
    "vllm_xargs": Foreign(PROCESSORS, OFF),
    # The prompt.
    "add_bos_token": Foreign(("add_special_tokens",)),
    "chat_template": Foreign(neutral=OFF, remedy="POST /v1/completions takes a text that you have laid out"),
    "documents": Foreign(("chat_template_kwargs",), OFF),
    "images": Foreign(neutral=OFF),
    "input_ids": Foreign(PROMPT),
    "inputs": Foreign(PROMPT),
    "max_chunks_per_doc": Foreign(remedy=TRUNCATION),
    "max_context_length": Foreign(remedy=CONTEXT),
    "max_tokens_per_doc": Foreign(remedy=TRUNCATION),
    "num_ctx": Foreign(remedy=CONTEXT),
    "plugins": Foreign(neutral=OFF),
    "prompt_embeds": Foreign(PROMPT, OFF),
    "prompt_token_ids": Foreign(PROMPT),
    "return_full_text": Foreign(("echo",), OFF),
    "safe_prompt": Foreign(("messages",), OFF),
    "system": Foreign(("instructions", "messages", "prompt"), OFF),
    "system_prompt": Foreign(("instructions", "messages", "prompt"), OFF),
    "transforms": Foreign(neutral=OFF, remedy=TRUNCATION),
    "truncate": Foreign(neutral=OFF, remedy=TRUNCATION),
    "truncate_prompt_tokens": Foreign(remedy=TRUNCATION),
    # Reasoning.
    "include_reasoning": Foreign(neutral=(True,)),
    "max_thinking_tokens": Foreign(PROCESSORS),
    "reasoning": Foreign(THINKING, OFF),
    "reasoning.enabled": Foreign(("effort",)),
    "reasoning.max_tokens": Foreign(("effort",)),
    "reasoning_budget": Foreign(PROCESSORS, (-1,)),
    "reasoning_format": Foreign(neutral=("auto", "parsed", "deepseek")),
    "separate_reasoning": Foreign(neutral=(True,)),
    "think": Foreign(THINKING),
    "thinking": Foreign(THINKING),
    "thinking_budget": Foreign(PROCESSORS),
    "thinking_token_budget": Foreign(PROCESSORS),
    # Fields in an object of their own.
    "extra_body": Foreign(neutral=OFF, remedy=TOP_LEVEL),
    "generation_config": Foreign(neutral=OFF, remedy=TOP_LEVEL),
    "options": Foreign(neutral=OFF, remedy=TOP_LEVEL),
    "parameters": Foreign(neutral=OFF, remedy=TOP_LEVEL),
    "sampling_params": Foreign(neutral=OFF, remedy=TOP_LEVEL),
}
"""Fields of vLLM, SGLang, llama.cpp, Ollama, TGI, transformers and hosted services, by their paths."""

ROUTES: Final = {
    name: path for path, body in reversed(BODIES.items()) for name in reversed(body.__struct_fields__)
}
"""A field of a body → the first route that has it."""


def without_unknown(data: bytes, body_type: type[msgspec.Struct]) -> tuple[bytes, list[str]]:
    """Return a body without its unknown fields, and the paths of those.

    Raises:
        ApiError: 400 for a field that must not be ignored, or for more than `MAX_UNKNOWN` unknown fields.
    """
    known = body_type.__struct_fields__
    fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    ignored: dict[str, None] = {}  # an ordered set
    _take_unknown(fields, known, "", ignored)
    for name in NESTED.keys() & fields.keys() & set(known):
        value = msgspec.json.decode(fields[name])
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                _take_unknown(item, NESTED[name].__struct_fields__, f"{name}.", ignored)
        fields[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields), [*ignored]


def _take_unknown(
    fields: dict[str, Any], known: Collection[str], prefix: str, ignored: dict[str, None]
) -> None:
    """Remove the unknown fields of an object, and add their paths to those that are ignored."""
    for name in [name for name in fields if name not in known]:
        value = fields.pop(name)
        value = msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value
        if value is None:
            continue  # which says that it is not given
        path = f"{prefix}{name}"
        if path in ignored and path not in FOREIGN:  # of an earlier item of the same list
            continue
        remedy = remedy_for(path, name, known, value)
        if remedy is not None:
            raise unknown_field(path, remedy)
        ignored[path] = None
        if len(ignored) > MAX_UNKNOWN:
            remedy = f"the body has more than the {MAX_UNKNOWN} that are ignored, leave them out"
            raise unknown_field(path, remedy)


def unknown_field(path: str, remedy: str | None) -> ApiError:
    """Return the refusal of an unknown field."""
    message = "unknown field" if remedy is None else f"unknown field; {remedy}"
    return bad_request(path, message, code="unknown_parameter")


def remedy_for(path: str, name: str, known: Collection[str], value: Any = ...) -> str | None:
    """Return what to do about a field that must not be ignored; None where it may be."""
    foreign = FOREIGN.get(path)
    if foreign is not None:
        if value in foreign.neutral:
            return None
        ours = next((own for own in foreign.ours if own in known), None)
        return foreign.remedy if ours is None else f"use {ours!r}, which is its name here"
    near = nearest_spelling(name, known)
    if near is not None:
        return f"did you mean {near!r}?"
    route = ROUTES.get(path)
    if route is None or (path in NO_EFFECT and NO_EFFECT[path].beside is None):
        return None
    return f"it is a field of {route}, not of this route; leave it out"


def nearest_spelling(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is few edits away; case and underscores make no difference."""
    if len(name) > MAX_NAME_CHARS:
        return None
    plain = _plain(name)
    edits = {own: num_edits(plain, _plain(own)) for own in known}
    least = min(edits.values(), default=MAX_EDITS + 1)
    if least > MAX_EDITS:
        return None
    near = min((own for own in edits if edits[own] == least), key=lambda own: num_edits(name, own))
    allowed = min(len(plain), len(_plain(near))) // CHARS_AN_EDIT
    return near if least <= allowed else None


def _plain(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


def num_edits(a: str, b: str) -> int:
    """Return how many insertions, deletions, substitutions and swaps of neighbours turn `a` into `b`.

    The optimal string alignment distance, where it is at most `MAX_EDITS`; any more is `MAX_EDITS` + 1.
    """
    too_many = MAX_EDITS + 1
    if abs(len(a) - len(b)) > MAX_EDITS or len({*a} - {*b}) > MAX_EDITS or len({*b} - {*a}) > MAX_EDITS:
        return too_many
    before = last = list(range(len(b) + 1))  # rows of the table of distances
    for i, char in enumerate(a, start=1):
        row = [i]
        for j, other in enumerate(b, start=1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + int(char != other)))
            if i > 1 and j > 1 and char == b[j - 2] and a[i - 2] == other:
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return min(last[-1], too_many)


def ignored_warning(paths: Sequence[str]) -> str:
    """Return the value of `Warning` that names fields which were ignored (RFC 7234, section 5.5)."""
    names = ", ".join(re.sub(r"[^\w.-]", "?", shortened(path), flags=re.ASCII) for path in paths[:MAX_NAMED])
    more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
    return f'299 - "unknown fields were ignored: {names}{more}"'
