"""Keywords from other programs: keywords that are accepted without effect, and our names for the others.

One table for Python (`config.strict_keywords`), the command line (`cli.serve`) and HTTP request bodies
(`server.openai.ignored_fields`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple


class Keyword(NamedTuple):
    """A keyword from another program, which is accepted only with values that have no effect."""

    use: tuple[str, ...] = ()  # our names for it; errors suggest the first that the class or body has
    accepted: tuple[Any, ...] | None = ()  # values without effect; None means any value
    reason: str = "leave it out"  # why it has no effect, or what to do without such a parameter

    def accepts(self, value: Any) -> bool:
        """Return True if the keyword has no effect with this value."""
        return self.accepted is None or value in self.accepted


def ignored(reason: str, accepted: tuple[Any, ...] | None = None) -> Keyword:
    """Return a keyword that has no effect with the values in `accepted` (None: with any value)."""
    return Keyword((), accepted, reason)


SWITCH: Final = (True, False)
ONE_DEVICE: Final = "one device holds the whole model"
PARALLEL: Final = f"{ONE_DEVICE}; use engine='vllm' to distribute it, with engine_options="
NEWEST: Final = "the newest revision is used; to use another, download it and pass its folder as the model"
LAUNCHES: Final = "the engine decides how it launches a step; results are the same"
OWN_TOKENIZER: Final = "the model's own fast tokenizer is always used"
LORAS: Final = "LoRA adapters of any rank can be loaded at any time (add_lora), as many as memory allows"

ENGINE: Final[dict[str, Keyword]] = {
    "num_gpu_blocks_override": Keyword(("kv_cache_memory_bytes",)),
    "speculative_config": Keyword(("speculate",)),
    "engine_worker_queue_port": ignored("the engine needs no port"),
    "cache_queue_port": ignored("the cache is part of the engine and needs no port"),
    "gpu_memory_utilization": ignored(
        "no share of the GPU is reserved; kv_cache_memory_bytes sets the size of the cache"
    ),
    "swap_space": ignored("preempted requests are recomputed, not swapped out"),
    "cpu_offload_gb": ignored("weights are not offloaded", (0, None)),
    "block_size": ignored("the cache shares prefixes token by token, not in blocks"),
    "enable_prefix_caching": ignored("prefixes are always shared, with the same results as without", SWITCH),
    "enable_chunked_prefill": ignored(
        "prompts run in chunks of max_num_batched_tokens; results are the same", SWITCH
    ),
    "enforce_eager": ignored(LAUNCHES, SWITCH),
    "max_seq_len_to_capture": ignored(LAUNCHES),
    "disable_custom_all_reduce": ignored(ONE_DEVICE, SWITCH),
    "tensor_parallel_size": ignored(PARALLEL + "{'tensor_parallel_size': N}", (1,)),
    "pipeline_parallel_size": ignored(PARALLEL + "{'pipeline_parallel_size': N}", (1,)),
    "quantization": ignored("the model's files determine the quantization", (None,)),
    "load_format": ignored(
        "the format is detected from the files: safetensors or GGUF", ("auto", "safetensors")
    ),
    "trust_remote_code": ignored("code in model folders is never run", (False,)),
    "revision": ignored(NEWEST, (None, "main")),
    "tokenizer_revision": ignored(NEWEST, (None, "main")),
    "tokenizer_mode": ignored(OWN_TOKENIZER, ("auto", "hf")),
    "skip_tokenizer_init": ignored(OWN_TOKENIZER, (False,)),
    "runner": ignored("every model can generate and score", ("auto", "generate")),
    "generation_config": ignored("unset parameters have the defaults of SamplingParams", ("vllm",)),
    "logprobs_mode": ignored("it is set per request, by SamplingParams.logprobs_mode", ("raw_logprobs",)),
    "enable_logprob": ignored("log-probabilities are always available", (True,)),
    "enable_lora": ignored(LORAS, SWITCH),
    "max_loras": ignored(LORAS),
    "max_lora_rank": ignored(LORAS),
    "served_model_name": ignored("the server sets the model names that clients use"),
    "disable_log_stats": ignored("statistics are reported on request (stats(), /metrics)", SWITCH),
}
"""Keywords of other programs that `EngineConfig` or `logprobe serve` ignores or rejects."""

SAMPLING: Final[dict[str, Keyword]] = {
    **dict.fromkeys(
        ("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"),
        Keyword(("response_format",)),
    ),
    "truncate_prompt_tokens": Keyword(("truncation",)),
    "detokenize": ignored("outputs always have the text and the token ids", SWITCH),
    "flat_logprobs": ignored("records are flat, and can also be used as a list of dicts", SWITCH),
    "skip_special_tokens": ignored(
        "texts have no special tokens; token_ids and logprobs include them", (True,)
    ),
    "spaces_between_special_tokens": ignored("texts have no special tokens", SWITCH),
    "skip_reading_prefix_cache": ignored("results are the same with cached prefixes", SWITCH),
}
"""Keywords of other programs' sampling parameters, or of their calls that take text."""

CLASSES: Final = {"EngineConfig": ENGINE, "SamplingParams": SAMPLING}

BY_KEY: Final = "clients are identified by their API keys, or else by their addresses"
KEPT_PREFIXES: Final = "prefixes are cached token by token while memory allows, with the same results"
NOT_READ: Final = "the model's chat template has no such variable"
NO_SUMMARY: Final = "reasoning is returned in full"
LEFT_OUT: Final = "the chat template omits it, in earlier turns or always"
NOT_BOUND: Final = "schemas are enforced only if tool_choice requires a call"

FIELDS_WITHOUT_EFFECT: Final[dict[str, Keyword]] = {
    # OpenAI.
    "user": ignored(BY_KEY),
    "safety_identifier": ignored(BY_KEY),
    "metadata": ignored("replies of this route are not stored"),
    "store": ignored("replies of this route are not stored"),
    "prompt_cache_key": ignored(KEPT_PREFIXES),
    "prompt_cache_options": ignored(KEPT_PREFIXES),
    "prompt_cache_retention": ignored(KEPT_PREFIXES),
    "stream_options.include_obfuscation": ignored("no padding is ever sent"),
    "reasoning.summary": ignored(NO_SUMMARY),
    "reasoning.generate_summary": ignored(NO_SUMMARY),
    "include.reasoning.encrypted_content": ignored("reasoning is returned and accepted as plain text"),
    # Other servers.
    "priority": ignored("requests are scheduled fairly among clients"),
    "cache_prompt": ignored(KEPT_PREFIXES),
    "guided_decoding_backend": ignored("all grammars use the same compiler"),
    "spaces_between_special_tokens": ignored("no spaces are added between special tokens"),
    # Fields without effect for some models.
    "reasoning_effort": ignored(NOT_READ),
    "reasoning.effort": ignored(NOT_READ),
    "enable_thinking": ignored(NOT_READ),
    "chat_template_kwargs.enable_thinking": ignored(NOT_READ),
    "messages.reasoning_content": ignored(LEFT_OUT),
    "input.reasoning": ignored(LEFT_OUT),
    # Fields that repeat another field, or have no effect without one.
    "parallel_tool_calls": ignored("there are no tools"),
    "tools.strict": ignored(NOT_BOUND),
    "tools.function.strict": ignored(NOT_BOUND),
    "top_logprobs": ignored("logprobs is false"),
    **{
        f"guided_{form}": ignored(f"structured_outputs.{form} has the same value")
        for form in ("json", "regex", "choice", "grammar")
    },
}
"""Fields of request bodies that are accepted without effect; the reply lists them in a `Warning` header.

The reasons are sent in that header: ASCII without quotation marks.
"""

NEUTRAL_FIELDS: Final[dict[str, Keyword]] = {
    "suffix": Keyword(accepted=("",)),
    "functions": Keyword(accepted=([],)),
    "function_call": Keyword(accepted=("none", "auto")),
    "modalities": Keyword(accepted=(["text"],)),
    "audio": Keyword(),
    "prediction": Keyword(),
    "verbosity": Keyword(accepted=("medium",)),
    "web_search_options": Keyword(),
    "background": Keyword(accepted=(False,)),
    "truncation": Keyword(accepted=("disabled",)),
    "max_tool_calls": Keyword(),
    "conversation": Keyword(),
    "response_format": Keyword(accepted=({"type": "text"},)),
    "service_tier": Keyword(accepted=("auto", "default")),
}
"""Fields of request bodies for unsupported features, with the values that do not use the feature."""

OFF: Final[tuple[Any, ...]] = (False, "", [], {})  # also matches 0, which equals False
MAX_TOKENS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
LOGPROBS: Final = ("top_logprobs", "logprobs")
FORM: Final = ("structured_outputs", "text")
PROMPT: Final = ("prompt", "messages", "input")
THINKING: Final = ("enable_thinking", "reasoning_effort", "reasoning")
PROCESSORS: Final = ("logits_processors_args",)
TRUNCATION: Final = "shorten the text (POST /tokenize counts its tokens)"
TOP_LEVEL: Final = "send its members as fields of the body"
PAIRS: Final = "use POST /v1/rerank to score documents against a query"
CONTEXT: Final = "the server's option --max-model-len sets the context length"

FOREIGN_FIELDS: Final[dict[str, Keyword]] = {
    # Sampling parameters under other names.
    "beam_width": Keyword(accepted=(1,)),
    "ban_eos_token": Keyword(("ignore_eos",), OFF),
    "bad_words_ids": Keyword(("bad_words",), OFF),
    "custom_token_bans": Keyword(("bad_words",), OFF),
    "do_sample": Keyword(("temperature",), (True,)),
    "freq_penalty": Keyword(("frequency_penalty",), OFF),
    "max_gen_len": Keyword(MAX_TOKENS),
    "max_completion_tokens": Keyword(MAX_TOKENS),
    "max_length": Keyword(MAX_TOKENS),
    "max_new_tokens": Keyword(MAX_TOKENS),
    "max_output_tokens": Keyword(MAX_TOKENS),
    "max_tokens": Keyword(MAX_TOKENS),
    "max_tokens_to_sample": Keyword(MAX_TOKENS),
    "min_length": Keyword(("min_tokens",), OFF),
    "min_new_tokens": Keyword(("min_tokens",), OFF),
    "n_predict": Keyword(MAX_TOKENS),
    "no_stop_trim": Keyword(("include_stop_str_in_output",), OFF),
    "num_predict": Keyword(MAX_TOKENS),
    "num_return_sequences": Keyword(("n",), (1,)),
    "pres_penalty": Keyword(("presence_penalty",), OFF),
    "random_seed": Keyword(("seed",)),
    "sampling_seed": Keyword(("seed",)),
    "rep_pen": Keyword(("repetition_penalty",), (1,)),
    "repeat_penalty": Keyword(("repetition_penalty",), (1,)),
    "sampler_seed": Keyword(("seed",), (-1,)),
    "sequence_bias": Keyword(("logit_bias",), OFF),
    "stop_sequence": Keyword(("stop",), OFF),
    "stop_sequences": Keyword(("stop",), OFF),
    "stop_strings": Keyword(("stop",), OFF),
    "stop_words": Keyword(("stop",), OFF),
    "suppress_tokens": Keyword(("logit_bias",), OFF),
    "temp": Keyword(("temperature",)),
    # Unsupported sampling parameters.
    "diversity_penalty": Keyword(accepted=OFF),
    "dry_multiplier": Keyword(accepted=OFF),
    "dynamic_temperature": Keyword(accepted=OFF),
    "dynatemp_range": Keyword(accepted=OFF),
    "early_stopping": Keyword(accepted=OFF),
    "encoder_repetition_penalty": Keyword(accepted=(1,)),
    "epsilon_cutoff": Keyword(accepted=OFF),
    "eta_cutoff": Keyword(accepted=OFF),
    "guidance_scale": Keyword(accepted=(1,)),
    "length_penalty": Keyword(accepted=(1,)),
    "min_keep": Keyword(accepted=(0, 1)),
    "mirostat": Keyword(accepted=OFF),
    "mirostat_mode": Keyword(accepted=OFF),
    "negative_prompt": Keyword(accepted=OFF),
    "no_repeat_ngram_size": Keyword(accepted=OFF),
    "num_beams": Keyword(accepted=(1,)),
    "penalty_alpha": Keyword(accepted=OFF),
    "repeat_last_n": Keyword(
        accepted=(-1,), reason="repetition_penalty applies to the whole text; leave it out"
    ),
    "samplers": Keyword(),
    "smoothing_factor": Keyword(accepted=OFF),
    "tfs": Keyword(accepted=(1,)),
    "tfs_z": Keyword(accepted=(1,)),
    "top_a": Keyword(accepted=OFF),
    "top_n_sigma": Keyword(accepted=(-1, 0)),
    "typical": Keyword(accepted=(1,)),
    "typical_p": Keyword(accepted=(1,)),
    "use_beam_search": Keyword(accepted=OFF),
    "repetition_detection": Keyword(accepted=OFF),
    "watermark": Keyword(accepted=OFF),
    "watermarking": Keyword(accepted=OFF),
    "xtc_probability": Keyword(accepted=OFF),
    # Log-probabilities.
    "decoder_input_details": Keyword(("prompt_logprobs",), OFF),
    "logprob_start_len": Keyword(("prompt_logprobs",), (-1,)),
    "n_probs": Keyword(LOGPROBS, OFF),
    "num_logprobs": Keyword(LOGPROBS, OFF),
    "post_sampling_probs": Keyword(("logprobs_mode",), OFF),
    "return_logprob": Keyword(("logprobs", "top_logprobs"), OFF),
    "self_certainty": Keyword(accepted=OFF, reason="is available only in Python; leave it out"),
    "token_ids_logprob": Keyword(("logprob_token_ids",), OFF),
    "top_logprobs_num": Keyword(LOGPROBS, OFF),
    "top_n_tokens": Keyword(LOGPROBS, OFF),
    # Output format, processors, weights.
    "adapter_id": Keyword(("lora",), OFF),
    "custom_logit_processor": Keyword(PROCESSORS, OFF),
    "custom_params": Keyword(PROCESSORS, OFF),
    "ebnf": Keyword(FORM, OFF),
    "extra_args": Keyword(PROCESSORS, OFF),
    "format": Keyword(("response_format", "text"), OFF),
    "grammar": Keyword(FORM, OFF),
    "guided_decoding": Keyword((*FORM, "response_format"), OFF),
    "guided_json_object": Keyword(("response_format", "text"), OFF),
    "guided_whitespace_pattern": Keyword(accepted=OFF),
    "json_schema": Keyword(("response_format", "text"), OFF),
    "logits_processors": Keyword(PROCESSORS, OFF),
    "lora_adapters": Keyword(("lora",), OFF),
    "lora_path": Keyword(("lora",), OFF),
    "lora_request": Keyword(("lora",), OFF),
    "regex": Keyword(FORM, OFF),
    "response_schema": Keyword(("response_format", "text"), OFF),
    "schema": Keyword(("response_format", "text"), OFF),
    "stop_regex": Keyword(("stop",), OFF),
    "vllm_xargs": Keyword(PROCESSORS, OFF),
    # The prompt.
    "add_bos_token": Keyword(("add_special_tokens",)),
    "chat_template": Keyword(
        accepted=OFF, reason="apply it yourself and send the text to POST /v1/completions"
    ),
    "documents": Keyword(accepted=OFF, reason="put the documents into a message"),
    "images": Keyword(accepted=OFF),
    "request_id": Keyword(accepted=None),
    "truncation_side": Keyword(accepted=("left",), reason="prompts are cut at their beginning; leave it out"),
    "input_ids": Keyword(PROMPT),
    "inputs": Keyword(PROMPT),
    "max_chunks_per_doc": Keyword(reason=TRUNCATION),
    "max_context_length": Keyword(reason=CONTEXT),
    "max_tokens_per_doc": Keyword(reason=TRUNCATION),
    "num_ctx": Keyword(reason=CONTEXT),
    "plugins": Keyword(accepted=OFF),
    "ec_transfer_params": Keyword(accepted=OFF),
    "kv_transfer_params": Keyword(accepted=OFF),
    "prompt_embeds": Keyword(PROMPT, OFF),
    "prompt_token_ids": Keyword(PROMPT),
    "return_full_text": Keyword(("echo",), OFF),
    "return_prompt_text": Keyword(accepted=OFF, reason="POST /tokenize returns the tokens of a conversation"),
    "safe_prompt": Keyword(("messages",), OFF),
    "system": Keyword(("instructions", "messages", "prompt"), OFF),
    "system_prompt": Keyword(("instructions", "messages", "prompt"), OFF),
    "transforms": Keyword(accepted=OFF, reason=TRUNCATION),
    "truncate": Keyword(accepted=OFF, reason=TRUNCATION),
    "truncate_prompt_tokens": Keyword(reason=TRUNCATION),
    "data_1": Keyword(reason=PAIRS),
    "data_2": Keyword(reason=PAIRS),
    "queries": Keyword(reason=PAIRS),
    "text_1": Keyword(reason=PAIRS),
    "text_2": Keyword(reason=PAIRS),
    # Reasoning.
    "include_reasoning": Keyword(accepted=(True,)),
    "max_thinking_tokens": Keyword(PROCESSORS),
    "reasoning": Keyword(THINKING, OFF),
    "reasoning.enabled": Keyword(("effort",)),
    "reasoning.max_tokens": Keyword(("effort",)),
    "reasoning_budget": Keyword(PROCESSORS, (-1,)),
    "reasoning_format": Keyword(accepted=("auto", "parsed", "deepseek")),
    "separate_reasoning": Keyword(accepted=(True,)),
    "think": Keyword(THINKING),
    "thinking": Keyword(THINKING),
    "thinking_budget": Keyword(PROCESSORS),
    "thinking_token_budget": Keyword(PROCESSORS),
    # Objects that contain fields.
    "extra_body": Keyword(accepted=OFF, reason=TOP_LEVEL),
    "generation_config": Keyword(accepted=OFF, reason=TOP_LEVEL),
    "options": Keyword(accepted=OFF, reason=TOP_LEVEL),
    "parameters": Keyword(accepted=OFF, reason=TOP_LEVEL),
    "sampling_params": Keyword(accepted=OFF, reason=TOP_LEVEL),
}
"""Body fields in vLLM, SGLang, llama.cpp, Ollama, TGI, transformers and hosted services, by path.

A route that does not define one of these fields ignores it if its value is accepted here, and otherwise
rejects the request.
"""


def names_here(name: str) -> tuple[str, ...]:
    """Return our names for a keyword from another program."""
    return tuple(
        own for table in (ENGINE, SAMPLING, FOREIGN_FIELDS) if name in table for own in table[name].use
    )
