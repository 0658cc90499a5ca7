"""Parameters that other programs write, and that mean nothing here: which of their values are taken, and why.

`config.strict_keywords` asks here about a keyword that its class does not have. What means something here
under another name stands in `errors.OTHER_NAMES`.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logprobe.errors import ParameterError, UnknownParameterError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

logger = logging.getLogger("logprobe")


class Word(NamedTuple):
    """Why a parameter has no meaning here, and the values that are taken.

    None: any. A switch may stand either way; else the values are those that say what is so anyway.
    """

    why: str
    values: tuple[Any, ...] | None = None


SWITCH: Final = (True, False)
ONE_DEVICE: Final = "one device holds the whole model"
PARALLEL: Final = f"{ONE_DEVICE}; engine='vllm' shares it out, with engine_options="
NEWEST: Final = "the hub's newest is read; fetch another revision into a folder, and name that as the model"
LAUNCHES: Final = "how a step is launched is the engine's own affair, and its numbers are the same"
OWN_TOKENIZER: Final = "texts are read by the model's own fast tokenizer"
LORAS: Final = "LoRA weights of any rank can always be loaded (add_lora), as many as the memory holds"

OTHER_WORDS: Final[dict[str, dict[str, Word]]] = {
    "EngineConfig": {
        "engine_worker_queue_port": Word("the engine is reached without a port"),
        "cache_queue_port": Word("the cache is the engine's own, and is reached without a port"),
        "gpu_memory_utilization": Word("no share of a device is set aside; the cache takes kv_bytes"),
        "swap_space": Word("nothing is swapped out; what gives way is computed again"),
        "cpu_offload_gb": Word("all weights lie where they run", (0, None)),
        "block_size": Word("the cache shares prefixes token by token, not in blocks"),
        "enable_prefix_caching": Word("prefixes are shared, and numbers the same as without", SWITCH),
        "enable_chunked_prefill": Word("prompts run in chunks of max_batch_tokens, numbers the same", SWITCH),
        "kv_cache_dtype": Word("kv_dtype is the dtype of cached keys and values", ("auto",)),
        "enforce_eager": Word(LAUNCHES, SWITCH),
        "max_seq_len_to_capture": Word(LAUNCHES),
        "disable_custom_all_reduce": Word(ONE_DEVICE, SWITCH),
        "tensor_parallel_size": Word(PARALLEL + "{'tensor_parallel_size': N}", (1,)),
        "pipeline_parallel_size": Word(PARALLEL + "{'pipeline_parallel_size': N}", (1,)),
        "quantization": Word("weights are those of the model's files, quantised or not", (None,)),
        "load_format": Word("files are read by what they are: safetensors or GGUF", ("auto", "safetensors")),
        "trust_remote_code": Word("code that comes with a model is never run", (False,)),
        "revision": Word(NEWEST, (None, "main")),
        "tokenizer_revision": Word(NEWEST, (None, "main")),
        "tokenizer_mode": Word(OWN_TOKENIZER, ("auto", "hf")),
        "skip_tokenizer_init": Word(OWN_TOKENIZER, (False,)),
        "runner": Word("a model generates and scores", ("auto", "generate")),
        "generation_config": Word("what SamplingParams does not say has its default there", ("vllm",)),
        "logprobs_mode": Word("SamplingParams.logprobs_mode says it, request by request", ("raw_logprobs",)),
        "enable_logprob": Word("log-probabilities are always to be had", (True,)),
        "enable_lora": Word(LORAS, SWITCH),
        "max_loras": Word(LORAS),
        "max_lora_rank": Word(LORAS),
        "served_model_name": Word("clients' names for a model are the server's"),
        "disable_log_stats": Word("figures are told when they are asked for (stats(), /metrics)", SWITCH),
    },
    "SamplingParams": {
        "detokenize": Word("texts always come beside the ids", SWITCH),
        "flat_logprobs": Word("records are flat, and read as a list of dicts as well", SWITCH),
        "skip_special_tokens": Word(
            "a text leaves special tokens out; its token_ids and its record hold them", (True,)
        ),
        "spaces_between_special_tokens": Word("a text leaves special tokens out", SWITCH),
        "skip_reading_prefix_cache": Word("numbers are the same with cached prefixes", SWITCH),
    },
}
"""Class of parameters → name → what becomes of it."""


def without_other_words(given: Mapping[str, Any], known: Collection[str], *, of: str) -> dict[str, Any]:
    """The parameters that the class `of` has; others that change nothing are left out.

    What asks for something that is not to be had here is told, once.

    Raises:
        ParameterError: one that would change something, or promises what is not done here.
        UnknownParameterError: one that nobody knows.
    """
    engine = given.get("engine", "native")
    for name in (name for name in given if name not in known):
        word = OTHER_WORDS.get(of, {}).get(name)
        if word is None:
            raise UnknownParameterError(name, known, of=of)
        if engine != "native":
            raise ParameterError(name, f"is for engine={engine!r} to take: engine_options={{{name!r}: ...}}")
        if word.values is not None and given[name] not in word.values:
            values = " or ".join(map(repr, word.values))
            raise ParameterError(name, f"must be {values}, got {given[name]!r:.60}: {word.why}")
        if word.values in (None, SWITCH):
            _tell(name, word.why)
    return {name: value for name, value in given.items() if name in known}


@cache
def _tell(name: str, why: str) -> None:
    logger.warning("%s changes nothing here: %s", name, why)
