"""From a configuration to a running vLLM: its options, its processes, and the proof of its rows."""

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
# Set here, or against what this engine promises.
OWN_OPTIONS: Final = {
    "model": "is `model`",
    "tokenizer": "is the model's own",
    "seed": "is `seed`",
    "logits_processors": "is `logits_processors`, of this library's interface",
    "worker_extension_cls": "is this library's own",
    "additional_config": "is this library's own",
    "max_logprobs": "has no bound here; the server's limits are",
    "logprobs_mode": "is asked for by request, as SamplingParams.logprobs_mode",
    "speculative_config": "cannot stand beside the capture of rows; leave it out",
    "return_sampling_mask": "cannot stand beside the capture of rows; leave it out",
    "data_parallel_size": "lets vLLM's first engine alone answer for rows; start a server for each",
    "skip_tokenizer_init": "would leave texts without a tokenizer; leave it out",
}
TOLERANCES: Final = {"float32": 1e-4}  # nats, between the two routes of a row
COARSE: Final = 0.1  # of narrower dtypes: two passes may round differently
CHECKED_PROMPT: Final = (5, 6)
# Tokens of a cached block. vLLM's own on a CPU is 128, and a prompt finds whole blocks alone; multiples of 32
# are what its kernels take.
CPU_BLOCK_SIZE: Final = 32
CPU_LORAS: Final = 8  # places, of which the last stays empty (`loras`)

logger = logging.getLogger("logprobe")


def start_vllm_engine(config: EngineConfig) -> LoadedModel:
    """Load the model that `config` names into vLLM; errors as `start_engine`.

    Raises:
        ModelError: vLLM is missing, or cannot run the model.
        ParameterError: an option that vLLM refuses, or that this engine cannot serve.
        EngineError: rows captured in vLLM's workers are not vLLM's own.
    """
    began = time.perf_counter()
    load_processors(config.logits_processors)  # a wrong name is told before the weights are read
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
    """What vLLM raises while it starts, as this library's errors."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ParameterError(OPTIONS, f"vLLM refuses them: {error}") from error
    except Exception as error:
        raise ModelError(f"{model}: vLLM cannot run it: {error}") from error


async def _new_llm(args: Any) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(args)


def check_settings(config: EngineConfig) -> None:
    """Raise `ParameterError` for settings that only the native engine has."""
    remedy = "is the native engine's; leave it out, or use engine='native'"
    require(config.weights == "auto", "weights", remedy)
    require(not config.overlap, "overlap", f"{remedy}; vLLM overlaps by itself")
    require(not config.speculate, "speculate", remedy)
    require(not config.batch_invariant, "batch_invariant", remedy)
    require(not config.process, "process", f"{remedy}; vLLM has processes of its own")
    require(
        config.data_parallel == 1, "data_parallel", f"{remedy}; start one server for each replica of vLLM"
    )


def engine_args(config: EngineConfig, files: ModelFiles) -> Any:
    """What vLLM is started with: `AsyncEngineArgs` for a configuration and the options that it passes on.

    Raises:
        ImportError: vLLM is missing.
        ParameterError: an option that does not exist, or cannot be set.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    device = current_platform.device_type
    require(config.device in {"auto", device}, "device", f"this vLLM runs on {device}; use device='auto'")
    assert not isinstance(config.engine_options, str), "the configuration has read it"
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
    """What the fields of `EngineConfig` say; vLLM's own defaults stand where a field has its default."""
    dtype = config.dtype if config.dtype != "auto" else "float32" if device == "cpu" else "auto"
    args: dict[str, Any] = {
        "model": str(files.folder),
        "tokenizer": str(files.folder),
        "dtype": dtype,
        "seed": config.seed,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "generation_config": "vllm",  # a model's own settings of temperature and the like are not asked for
    }
    if has_gguf(files.folder):
        args["load_format"] = FORMAT
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    names = {"max_batch_tokens": "max_num_batched_tokens", "max_batch_rows": "max_num_seqs"}
    for name, theirs in names.items():
        if getattr(config, name) != defaults[name]:
            args[theirs] = getattr(config, name)
    if config.kv_bytes is not None:
        args["kv_cache_memory_bytes"] = config.kv_bytes
    if config.max_model_len is not None:
        args["max_model_len"] = config.max_model_len + 1  # the last token generated is never run
    return args


def worker_settings(config: EngineConfig, files: ModelFiles, dtype: str, device: str) -> dict[str, Any]:
    """What a `WorkerDraw` is made of, as plain values: vLLM hashes and sends it."""
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
    """Every id that ends a text, by the model's settings and by its tokenizer."""
    sources: list[Any] = [load_config(files), text, read_generation_config(files.folder)]
    ids: set[int] = set()
    for source in sources:
        named = getattr(source, "eos_token_id", None)
        ids.update(named if isinstance(named, list) else () if named is None else (named,))
    return frozenset(ids)


def adopt(llm: Any, bridge: LoopThread, config: EngineConfig, files: ModelFiles) -> LoadedModel:
    """Put a running `AsyncLLM`, which was made of `engine_args`, behind a `Front`.

    Raises:
        EngineError: rows captured in vLLM's workers are not vLLM's own.
        ParameterError: it was made without the logits processor of this library.
    """
    with quiet_transformers():
        text = text_edge(files)
    capabilities = _capabilities(llm, files)
    is_ours = SETTINGS in (llm.vllm_config.additional_config or {})
    require(is_ours, "llm_engine", f"runs without {PROCESSOR}; make it of engine_args()")
    ends = end_ids(files, text)
    facts = ModelFacts(
        vocab_size=capabilities.vocab_size,
        eos_token_ids=ends,
        text=text,
    )
    resolved = replace(config, dtype=capabilities.dtype)  # what processors are told
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
    """Compare a captured row with vLLM's own: the largest difference, nats.

    Raises:
        EngineError: they are rows of two distributions.
    """
    capabilities = engine.capabilities()
    ids = np.array(CHECKED_PROMPT, dtype=np.int32) % capabilities.vocab_size
    captured = bridge.run(captured_row(engine, ids))
    own = bridge.run(own_row(llm, ids, capabilities.vocab_size))
    is_finite = np.isfinite(own)
    difference = float(np.abs(captured[is_finite] - own[is_finite]).max())
    if not difference <= TOLERANCES.get(capabilities.dtype, COARSE):
        raise EngineError(
            f"a row captured in vLLM's worker differs by {difference:.2g} nats from vLLM's own; this version "
            "of vLLM changes logits before its logits processors: please report it"
        )
    return difference


async def captured_row(engine: Front, ids: Array) -> Array:
    """The next-token distribution, through the logits processor and `collective_rpc`."""
    admitted = Requests(engine).admit(ids, SamplingParams(max_tokens=1), wants_row=True)
    engine.submit([admitted])
    [completion] = (await engine.result(admitted.request.request_id)).outputs
    if completion.error is not None:
        raise completion.error
    assert completion.row is not None
    return completion.row


async def own_row(llm: Any, ids: Array, vocab_size: int) -> Array:
    """The next-token distribution in vLLM's own portable form."""
    row: Array | None = None
    name = f"logprobe-check-{uuid.uuid4().hex}"
    async for output in llm.generate({"prompt_token_ids": ids.tolist()}, portable_params(), name):
        if output.outputs[0].token_ids:
            row = portable_row(output, vocab_size)
    assert row is not None, "one token was asked for"
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
        max_batch_tokens=scheduler.max_num_batched_tokens,
        max_batch_rows=scheduler.max_num_seqs,
        prompt_logprobs_with_prefix_cache=False,
        stages=("raw_logprobs", "processed_logprobs"),
        num_processes=1,
        weight_version=files.version,
        quantization=quantization(files),
    )
