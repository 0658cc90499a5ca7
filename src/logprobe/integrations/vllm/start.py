"""Start vLLM from an `EngineConfig`, and verify the log-probabilities computed in vLLM's workers."""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.config import EngineConfig
from logprobe.engine.backends.bridge import LoopThread
from logprobe.engine.backends.process.admission import Admission, processor_names
from logprobe.engine.backends.start import LoadedModel, text_edge
from logprobe.engine.front import Front
from logprobe.engine.protocol import Capabilities
from logprobe.engine.request import Requests
from logprobe.errors import EngineError, ModelError, ParameterError, UnknownParameterError, require
from logprobe.integrations.vllm.engine import VllmEngine
from logprobe.integrations.vllm.orders import FORMAT, SETTINGS
from logprobe.integrations.vllm.params import portable_params, portable_row
from logprobe.models import load_config, quantization, resolve, weight_version
from logprobe.models.config_files import read_generation_config
from logprobe.models.quiet import quiet_transformers
from logprobe.models.resolution import has_gguf
from logprobe.processors import ModelFacts
from logprobe.processors.registry import load_processors
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.models import ModelFiles
    from logprobe.records.store.columns import Array
    from logprobe.text.edge import TextEdge

PROCESSOR: Final = "logprobe.integrations.vllm.worker:LogprobeLogitsProcessor"
EXTENSION: Final = "logprobe.integrations.vllm.worker.RowsExtension"
MISSING: Final = "engine='vllm' needs vLLM; pip install 'logprobe[vllm]' (docs/vllm.md: on a CPU)"
OPTIONS: Final = "engine_options"
# Options that callers cannot set: set by this library, or incompatible with it.
OWN_OPTIONS: Final = {
    "model": "is set by `model`",
    "tokenizer": "is the model's own; leave it out",
    "seed": "is set by `seed`",
    "logits_processors": "is set by `logits_processors`, with this library's interface",
    "worker_extension_cls": "is set by this library; leave it out",
    "additional_config": "is set by this library; leave it out",
    "max_logprobs": "is unlimited here; leave it out (servers have their own limits)",
    "logprobs_mode": "is set per request; use SamplingParams.logprobs_mode",
    "speculative_config": "is not supported with this library's logits processor; leave it out",
    "return_sampling_mask": "is not supported with this library's logits processor; leave it out",
    "data_parallel_size": "is not supported: only vLLM's first engine returns rows; use a server per replica",
    "skip_tokenizer_init": "is not supported: texts need the tokenizer; leave it out",
}
TOLERANCES: Final = {"float32": 1e-4}  # nats, maximum difference between the processor's row and vLLM's
COARSE: Final = 0.1  # nats, for narrower dtypes, as two forward passes may round differently
CHECKED_PROMPT: Final = (5, 6)
# Tokens per cache block. vLLM's default on a CPU is 128, but prefixes are only reused in whole blocks; its
# kernels support multiples of 32.
CPU_BLOCK_SIZE: Final = 32
CPU_LORAS: Final = 8  # adapter slots; the last stays empty (`loras`)

logger = logging.getLogger("logprobe")


def start_vllm_engine(config: EngineConfig) -> LoadedModel:
    """Load the model in `config` into vLLM. Also raises the errors of `start_engine`.

    Raises:
        ModelError: vLLM is not installed, or cannot run the model.
        ParameterError: vLLM rejects an option, or this library does not support it.
        EngineError: the rows captured in vLLM's workers differ from the rows that vLLM returns.
    """
    began = time.perf_counter()
    load_processors(config.logits_processors)  # reports a wrong name before the weights are read
    check_settings(config)
    files = resolve(config.model)
    files = replace(files, version=weight_version(files))
    try:
        args = engine_args(config, files)
    except ImportError as error:
        raise ModelError(MISSING) from error
    bridge = LoopThread()
    try:
        with telling_refusals(config.model):
            llm = bridge.run(_new_llm(args))
    except BaseException:
        bridge.close()
        raise
    loaded = adopt(llm, bridge, config, files)
    logger.info("%s: vLLM ready in %.1f s", files.name, time.perf_counter() - began)
    return loaded


@contextmanager
def telling_refusals(model: str) -> Iterator[None]:
    """Convert exceptions that vLLM raises at startup to this library's errors."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ParameterError(OPTIONS, f"vLLM rejects these options: {error}") from error
    except Exception as error:
        raise ModelError(f"{model}: vLLM cannot run this model: {error}") from error


async def _new_llm(args: Any) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(args)


def check_settings(config: EngineConfig) -> None:
    """Raise `ParameterError` for settings that only the native engine supports."""
    load, cache, scheduler = config.load_config, config.cache_config, config.scheduler_config
    parallel = config.parallel_config
    remedy = "is only supported by the native engine; leave it out, or use engine='native'"
    require(load.weights == "auto", "weights", remedy)
    require(load.arithmetic == "auto", "arithmetic", remedy)
    own = "is only supported by the native engine; for vLLM, set engine_options={'kv_cache_dtype': ...}"
    require(cache.kv_cache_dtype == "float32", "kv_cache_dtype", own)
    require(not scheduler.async_scheduling, "async_scheduling", f"{remedy}; vLLM overlaps steps by itself")
    require(not scheduler.speculate, "speculate", remedy)
    require(not config.batch_invariant, "batch_invariant", remedy)
    require(not parallel.process, "process", f"{remedy}; vLLM starts its own processes")
    require(
        parallel.data_parallel_size == 1,
        "data_parallel_size",
        f"{remedy}; start one server per replica of vLLM",
    )


def engine_args(config: EngineConfig, files: ModelFiles) -> Any:
    """Return the `AsyncEngineArgs` for a configuration, including its `engine_options`.

    Raises:
        ImportError: vLLM is not installed.
        ParameterError: an option is unknown or cannot be set.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    device = current_platform.device_type
    require(config.device in {"auto", device}, "device", f"must be auto or {device}, the device of this vLLM")
    assert not isinstance(config.engine_options, str), "parsed by EngineConfig"
    options = dict(config.engine_options or {})
    known = {field.name for field in fields(AsyncEngineArgs)}
    for name, value in options.items():
        if name not in known:
            raise UnknownParameterError(name, known, of="AsyncEngineArgs (engine_options)")
        is_free = name not in OWN_OPTIONS or (name == "data_parallel_size" and value == 1)
        require(is_free, OPTIONS, f"{name} {OWN_OPTIONS.get(name)}")
    own = _own_args(config, files, device)
    if device == "cpu":
        own["block_size"] = CPU_BLOCK_SIZE
        if options.get("enable_lora"):
            own["max_loras"] = CPU_LORAS
    own |= {
        "logits_processors": [PROCESSOR],
        "worker_extension_cls": EXTENSION,
        "additional_config": {SETTINGS: worker_settings(config, files, own["dtype"], device)},
        "max_logprobs": -1,
        "logprobs_mode": "raw_logprobs",
    }
    return AsyncEngineArgs(**own | options)


def _own_args(config: EngineConfig, files: ModelFiles, device: str) -> dict[str, Any]:
    """Convert fields of `EngineConfig` to vLLM's arguments; unset fields keep vLLM's defaults."""
    dtype = config.dtype if config.dtype != "auto" else "float32" if device == "cpu" else "auto"
    args: dict[str, Any] = {
        "model": str(files.folder),
        "tokenizer": str(files.folder),
        "dtype": dtype,
        "seed": config.seed,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "generation_config": "vllm",  # do not use the sampling defaults in the model's folder
    }
    if has_gguf(files.folder):
        args["load_format"] = FORMAT
    given, defaults = config.keywords(), EngineConfig().keywords()
    for name in ("max_num_batched_tokens", "max_num_seqs", "kv_cache_memory_bytes"):
        if given[name] != defaults[name]:
            args[name] = given[name]
    if config.max_model_len is not None:
        args["max_model_len"] = config.max_model_len + 1  # the last generated token is never an input
    return args


def worker_settings(config: EngineConfig, files: ModelFiles, dtype: str, device: str) -> dict[str, Any]:
    """Return the settings for `WorkerDraw` as plain values, because vLLM hashes and sends them."""
    return {
        "engine": uuid.uuid4().hex,
        "eos_token_ids": sorted(end_ids(files, text_edge(files))),
        "config": {
            "model": str(files.folder),
            "seed": config.seed,
            "dtype": dtype,
            "device": device if device in {"cpu", "cuda"} else "auto",
            "logits_processors": list(processor_names(config.logits_processors)),
        },
    }


def end_ids(files: ModelFiles, text: TextEdge) -> frozenset[int]:
    """Return all ids that end a text, from the model's configuration, generation settings and tokenizer."""
    sources: list[Any] = [load_config(files), text, read_generation_config(files.folder)]
    ids: set[int] = set()
    for source in sources:
        named = getattr(source, "eos_token_id", None)
        ids.update(named if isinstance(named, list) else () if named is None else (named,))
    return frozenset(ids)


def adopt(llm: Any, bridge: LoopThread, config: EngineConfig, files: ModelFiles) -> LoadedModel:
    """Wrap a running `AsyncLLM`, which was created with `engine_args`, in a `Front`.

    Raises:
        EngineError: the rows captured in vLLM's workers differ from the rows that vLLM returns.
        ParameterError: the engine was created without this library's logits processor.
    """
    with quiet_transformers():
        text = text_edge(files)
    capabilities = _capabilities(llm, files)
    is_ours = SETTINGS in (llm.vllm_config.additional_config or {})
    require(is_ours, "llm_engine", f"runs without {PROCESSOR}; create it with engine_args()")
    ends = end_ids(files, text)
    facts = ModelFacts(
        vocab_size=capabilities.vocab_size,
        eos_token_ids=ends,
        text=text,
    )
    resolved = replace(config, dtype=capabilities.dtype)  # as processors see it
    core = VllmEngine(
        llm,
        bridge,
        capabilities=capabilities,
        admission=Admission(resolved, capabilities, facts),
        end_ids=sorted(ends),
    )
    engine = Front(core, text.vocabulary)
    try:
        check_routes(engine, llm, bridge)
    except BaseException:
        engine.close()
        raise
    return LoadedModel(engine, text)


def check_routes(engine: Front, llm: Any, bridge: LoopThread) -> float:
    """Compare a row from our logits processor in vLLM's worker with the same row from vLLM's own logprobs.

    Returns the largest difference, in nats.

    Raises:
        EngineError: the difference is larger than rounding can explain.
    """
    capabilities = engine.capabilities()
    ids = np.array(CHECKED_PROMPT, dtype=np.int32) % capabilities.vocab_size
    captured = bridge.run(captured_row(engine, ids))
    own = bridge.run(own_row(llm, ids, capabilities.vocab_size))
    is_finite = np.isfinite(own)
    difference = float(np.abs(captured[is_finite] - own[is_finite]).max())
    if not difference <= TOLERANCES.get(capabilities.dtype, COARSE):
        raise EngineError(
            f"log-probabilities in vLLM's worker differ by {difference:.2g} nats from vLLM's own; this "
            "version of vLLM changes logits before its logits processors; please report it"
        )
    return difference


async def captured_row(engine: Front, ids: Array) -> Array:
    """Return a next-token row from our logits processor in the worker: (V,) float32, nats."""
    admitted = Requests(engine).admit(ids, SamplingParams(max_tokens=1), wants_row=True)
    engine.submit([admitted])
    [completion] = (await engine.result(admitted.request.request_id)).outputs
    if completion.error is not None:
        raise completion.error
    assert completion.row is not None
    return completion.row


async def own_row(llm: Any, ids: Array, vocab_size: int) -> Array:
    """Return a next-token row from vLLM's `logprobs`: (V,) float32, nats."""
    row: Array | None = None
    name = f"logprobe-check-{uuid.uuid4().hex}"
    async for output in llm.generate({"prompt_token_ids": ids.tolist()}, portable_params(), name):
        if output.outputs[0].token_ids:
            row = portable_row(output, vocab_size)
    assert row is not None, "one token was requested"
    return row


def _capabilities(llm: Any, files: ModelFiles) -> Capabilities:
    config = llm.vllm_config
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    return Capabilities(
        engine="vllm",
        model=files.name,
        device=str(config.device_config.device_type),
        dtype=str(model.dtype).removeprefix("torch."),
        weights="vllm",
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len - 1,
        num_slots=(cache.num_gpu_blocks or 0) * cache.block_size,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        prompt_logprobs_with_prefix_cache=False,
        stages=("raw_logprobs", "processed_logprobs"),
        num_processes=1,
        weight_version=files.version,
        quantization=quantization(files),
    )
