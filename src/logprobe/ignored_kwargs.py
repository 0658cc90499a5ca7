"""Keywords of other programs: those accepted without effect, and our names for the others.

One table for Python (`config.strict_keywords`), the command line (`cli.options`) and HTTP request bodies
(`server.openai.ignored_fields`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple


class Keyword(NamedTuple):
    """A keyword of another program: accepted with values that have no effect, rejected with any other."""

    use: tuple[str, ...] = ()  # our names for it; suggests the first one that the class or body has
    accepted: tuple[Any, ...] | None = ()  # values without effect; None: any value
    reason: str = "leave it out"  # why it has no effect, or what to do if we have no such parameter

    def accepts(self, value: Any) -> bool:
        """Return whether the keyword has no effect with this value."""
        return self.accepted is None or value in self.accepted


def ignored(reason: str, accepted: tuple[Any, ...] | None = None) -> Keyword:
    """Return a keyword that has no effect."""
    return Keyword((), accepted, reason)


SWITCH: Final = (True, False)
ONE_DEVICE: Final = "one device holds the whole model"
PARALLEL: Final = f"{ONE_DEVICE}; engine='vllm' shares it out, with engine_options="
NEWEST: Final = "the hub's newest is read; fetch another revision into a folder, and name that as the model"
LAUNCHES: Final = "how a step is launched is the engine's own affair, and its numbers are the same"
OWN_TOKENIZER: Final = "texts are read by the model's own fast tokenizer"
LORAS: Final = "LoRA weights of any rank can always be loaded (add_lora), as many as the memory holds"

ENGINE: Final[dict[str, Keyword]] = {
    "async_scheduling": Keyword(("overlap",)),
    "data_parallel_size": Keyword(("data_parallel",)),
    "kv_cache_memory_bytes": Keyword(("kv_bytes",)),
    "max_num_batched_tokens": Keyword(("max_batch_tokens",)),
    "max_num_seqs": Keyword(("max_batch_rows",)),
    "num_gpu_blocks_override": Keyword(("kv_bytes",)),
    "speculative_config": Keyword(("speculate",)),
    "engine_worker_queue_port": ignored("the engine is reached without a port"),
    "cache_queue_port": ignored("the cache is the engine's own, and is reached without a port"),
    "gpu_memory_utilization": ignored("no share of a device is set aside; the cache takes kv_bytes"),
    "swap_space": ignored("nothing is swapped out; what gives way is computed again"),
    "cpu_offload_gb": ignored("all weights lie where they run", (0, None)),
    "block_size": ignored("the cache shares prefixes token by token, not in blocks"),
    "enable_prefix_caching": ignored("prefixes are shared, and numbers the same as without", SWITCH),
    "enable_chunked_prefill": ignored("prompts run in chunks of max_batch_tokens, numbers the same", SWITCH),
    "kv_cache_dtype": ignored("kv_dtype is the dtype of cached keys and values", ("auto",)),
    "enforce_eager": ignored(LAUNCHES, SWITCH),
    "max_seq_len_to_capture": ignored(LAUNCHES),
    "disable_custom_all_reduce": ignored(ONE_DEVICE, SWITCH),
    "tensor_parallel_size": ignored(PARALLEL + "{'tensor_parallel_size': N}", (1,)),
    "pipeline_parallel_size": ignored(PARALLEL + "{'pipeline_parallel_size': N}", (1,)),
    "quantization": ignored("weights are those of the model's files, quantised or not", (None,)),
    "load_format": ignored("files are read by what they are: safetensors or GGUF", ("auto", "safetensors")),
    "trust_remote_code": ignored("code that comes with a model is never run", (False,)),
    "revision": ignored(NEWEST, (None, "main")),
    "tokenizer_revision": ignored(NEWEST, (None, "main")),
    "tokenizer_mode": ignored(OWN_TOKENIZER, ("auto", "hf")),
    "skip_tokenizer_init": ignored(OWN_TOKENIZER, (False,)),
    "runner": ignored("a model generates and scores", ("auto", "generate")),
    "generation_config": ignored("what SamplingParams does not say has its default there", ("vllm",)),
    "logprobs_mode": ignored("SamplingParams.logprobs_mode says it, request by request", ("raw_logprobs",)),
    "enable_logprob": ignored("log-probabilities are always to be had", (True,)),
    "enable_lora": ignored(LORAS, SWITCH),
    "max_loras": ignored(LORAS),
    "max_lora_rank": ignored(LORAS),
    "served_model_name": ignored("clients' names for a model are the server's"),
    "disable_log_stats": ignored("figures are told when they are asked for (stats(), /metrics)", SWITCH),
}
"""Keywords of `EngineConfig`; also flags of `logprobe serve`."""

SAMPLING: Final[dict[str, Keyword]] = {
    **dict.fromkeys(
        ("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"),
        Keyword(("response_format",)),
    ),
    "truncate_prompt_tokens": Keyword(("truncation",)),
    "detokenize": ignored("texts always come beside the ids", SWITCH),
    "flat_logprobs": ignored("records are flat, and read as a list of dicts as well", SWITCH),
    "skip_special_tokens": ignored(
        "a text leaves special tokens out; its token_ids and its record hold them", (True,)
    ),
    "spaces_between_special_tokens": ignored("a text leaves special tokens out", SWITCH),
    "skip_reading_prefix_cache": ignored("numbers are the same with cached prefixes", SWITCH),
}
"""Keywords of `SamplingParams`, and of calls that take text."""

CLASSES: Final = {"EngineConfig": ENGINE, "SamplingParams": SAMPLING}

BY_KEY: Final = "clients are told apart by their keys, or else by their addresses"
KEPT_PREFIXES: Final = "prefixes are shared token by token as long as there is room, with the same numbers"
NOT_READ: Final = "the model's chat template reads no such variable"
NO_SUMMARY: Final = "reasoning comes as it was written"
LEFT_OUT: Final = "the chat template leaves it out, of earlier turns or always"
NOT_BOUND: Final = "calls are held to their schemas where tool_choice asks for one"

FIELDS_WITHOUT_EFFECT: Final[dict[str, Keyword]] = {
    # OpenAI.
    "user": ignored(BY_KEY),
    "safety_identifier": ignored(BY_KEY),
    "metadata": ignored("replies of this route are not kept"),
    "store": ignored("replies of this route are not kept"),
    "prompt_cache_key": ignored(KEPT_PREFIXES),
    "prompt_cache_options": ignored(KEPT_PREFIXES),
    "prompt_cache_retention": ignored(KEPT_PREFIXES),
    "stream_options.include_obfuscation": ignored("no padding is ever sent"),
    "reasoning.summary": ignored(NO_SUMMARY),
    "reasoning.generate_summary": ignored(NO_SUMMARY),
    "include.reasoning.encrypted_content": ignored("reasoning comes as text, and is read back as such"),
    # Other servers.
    "cache_prompt": ignored(KEPT_PREFIXES),
    "guided_decoding_backend": ignored("one compiler serves all grammars"),
    "spaces_between_special_tokens": ignored("a text leaves special tokens out"),
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
    "top_logprobs": ignored("logprobs: false asks for none"),
    **{
        f"guided_{form}": ignored(f"structured_outputs.{form} says the same")
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
    "skip_special_tokens": Keyword(accepted=(True,)),
}
"""Fields of request bodies for unsupported features, with the values that do not use the feature."""

OFF: Final[tuple[Any, ...]] = (False, "", [], {})  # also matches 0, which equals False
MAX_TOKENS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
LOGPROBS: Final = ("top_logprobs", "logprobs")
FORM: Final = ("structured_outputs", "text")
PROMPT: Final = ("prompt", "messages", "input")
THINKING: Final = ("enable_thinking", "reasoning_effort", "reasoning")
PROCESSORS: Final = ("logits_processors_args",)
TRUNCATION: Final = "shorten the text; POST /tokenize counts its tokens"
TOP_LEVEL: Final = "send its members as fields of the body"
CONTEXT: Final = "the operator sets the context, by --max-model-len"

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
    "repeat_last_n": Keyword(accepted=(-1,), reason="repetition_penalty counts the whole text; leave it out"),
    "samplers": Keyword(),
    "smoothing_factor": Keyword(accepted=OFF),
    "tfs": Keyword(accepted=(1,)),
    "tfs_z": Keyword(accepted=(1,)),
    "top_a": Keyword(accepted=OFF),
    "top_n_sigma": Keyword(accepted=(-1, 0)),
    "typical": Keyword(accepted=(1,)),
    "typical_p": Keyword(accepted=(1,)),
    "use_beam_search": Keyword(accepted=OFF),
    "watermark": Keyword(accepted=OFF),
    "xtc_probability": Keyword(accepted=OFF),
    # Log-probabilities.
    "decoder_input_details": Keyword(("prompt_logprobs",), OFF),
    "logprob_start_len": Keyword(("prompt_logprobs",), (-1,)),
    "n_probs": Keyword(LOGPROBS, OFF),
    "num_logprobs": Keyword(LOGPROBS, OFF),
    "post_sampling_probs": Keyword(("logprobs_mode",), OFF),
    "return_logprob": Keyword(("logprobs", "top_logprobs"), OFF),
    "self_certainty": Keyword(accepted=OFF, reason="it reads whole rows; ask in Python, or leave it out"),
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
    "chat_template": Keyword(accepted=OFF, reason="POST /v1/completions takes a text that you have laid out"),
    "documents": Keyword(("chat_template_kwargs",), OFF),
    "images": Keyword(accepted=OFF),
    "input_ids": Keyword(PROMPT),
    "inputs": Keyword(PROMPT),
    "max_chunks_per_doc": Keyword(reason=TRUNCATION),
    "max_context_length": Keyword(reason=CONTEXT),
    "max_tokens_per_doc": Keyword(reason=TRUNCATION),
    "num_ctx": Keyword(reason=CONTEXT),
    "plugins": Keyword(accepted=OFF),
    "prompt_embeds": Keyword(PROMPT, OFF),
    "prompt_token_ids": Keyword(PROMPT),
    "return_full_text": Keyword(("echo",), OFF),
    "safe_prompt": Keyword(("messages",), OFF),
    "system": Keyword(("instructions", "messages", "prompt"), OFF),
    "system_prompt": Keyword(("instructions", "messages", "prompt"), OFF),
    "transforms": Keyword(accepted=OFF, reason=TRUNCATION),
    "truncate": Keyword(accepted=OFF, reason=TRUNCATION),
    "truncate_prompt_tokens": Keyword(reason=TRUNCATION),
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
"""Fields of vLLM, SGLang, llama.cpp, Ollama, TGI, transformers and hosted services, by their paths.

A route without such a field ignores it if it has an accepted value, and rejects the request otherwise.
"""


def names_here(name: str) -> tuple[str, ...]:
    """Return our names for a keyword of another program."""
    return tuple(
        own for table in (ENGINE, SAMPLING, FOREIGN_FIELDS) if name in table for own in table[name].use
    )
