"""Start the native engine from a configuration: weights, tokenizer, kernels, and its thread or processes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from logprobe import runtime
from logprobe.config import ENGINES, CacheConfig, EngineConfig
from logprobe.engine.backends.thread import EngineThread
from logprobe.engine.engine import Engine
from logprobe.engine.forward.native import NativeForward
from logprobe.engine.forward.process_memory import keep_out_of_collections, resident_bytes
from logprobe.engine.forward.system_limits import free_bytes
from logprobe.engine.front import Front
from logprobe.engine.protocol import Capabilities
from logprobe.errors import MissingPackageError, ModelError, require
from logprobe.models import load_tokenizer, quantization, resolve, weight_version
from logprobe.models.cache import in_words
from logprobe.models.fast_tokenizer import SETTINGS, FastTokenizer, read_fast_tokenizer
from logprobe.models.folder import reading_errors
from logprobe.models.quiet import quiet_transformers
from logprobe.processors.registry import load_processors
from logprobe.text.edge import TextEdge, same_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.engine.draft_model import DraftModel
    from logprobe.models import ModelFiles
    from logprobe.processors import Pipeline

DRAFT_SHARE = 4  # the draft model's KV cache has 1/4 of the bytes of the model's
MIN_DRAFT_BYTES = 1 << 20

logger = logging.getLogger("logprobe")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A running engine with its tokenizer."""

    engine: Front
    text: TextEdge
    load_module: Callable[[], Any] | None = None  # returns the transformers module; None: not available
    processors: Pipeline | None = None  # None: the logits processors run in another process


@dataclass(frozen=True, slots=True)
class NativeParts:
    """A native engine that has not been started, and its properties."""

    engine: Engine
    capabilities: Capabilities
    text: TextEdge
    eos_token_ids: frozenset[int]
    kv_bytes: int  # size of the engine's KV cache


def start_engine(config: EngineConfig) -> LoadedModel:
    """Load the model of `config` and start its engine, in this process or in engine processes.

    Raises:
        ModelError: the model cannot be loaded.
        ParameterError: the settings do not fit the model.
        EngineError: an engine process exited before it was ready.
    """
    if config.engine in ENGINES:
        start: Callable[[EngineConfig], LoadedModel] = resolve_name(ENGINES[config.engine])
        return start(config)
    parallel = config.parallel_config
    if not parallel.process and parallel.data_parallel_size == 1:
        return start_native_engine(config)
    from logprobe.engine.backends.process.engine import ProcessEngine

    load_processors(config.logits_processors)
    text = text_edge(resolve(config.model))
    return LoadedModel(Front(ProcessEngine(config, text), text.vocabulary), text)


def start_native_engine(config: EngineConfig) -> LoadedModel:
    """Load the model of `config` and start its engine in this process.

    Raises:
        ModelError: the model cannot be loaded.
        ParameterError: the settings do not fit the model.
    """
    parts = build_native_engine(config)
    core = EngineThread(parts.engine, parts.capabilities, overlap=config.scheduler_config.async_scheduling)

    def load_module() -> Any:
        forward: Any = core.engine.forward  # of the weights in use at the time of the call
        with quiet_transformers():
            return forward.transformers_model()

    front = Front(core, parts.text.vocabulary)
    return LoadedModel(front, parts.text, load_module, parts.engine.sampling.pipeline)


def build_native_engine(config: EngineConfig) -> NativeParts:
    """Load the model of `config` and create its engine, without starting it.

    Raises:
        ModelError: the model cannot be loaded.
        ParameterError: the settings do not fit the model.
    """
    began = runtime.perf_counter()
    load_processors(config.logits_processors)  # fail on a wrong name before the weights are read
    files = resolve(config.model)
    version = weight_version(files)
    text = text_edge(files)
    forward = NativeForward(config, files)
    dtype = str(forward.dtype).removeprefix("torch.")
    config = replace(config, device=forward.device, dtype=dtype)  # the values that processors see
    eos_token_ids = _eos_token_ids(forward, text)
    drafter = None if config.scheduler_config.draft_model is None else _load_drafter(config, forward, text)
    engine = Engine(config, forward, text, eos_token_ids, drafter)
    capabilities = Capabilities(
        engine="native",
        model=files.name,
        device=forward.device,
        dtype=dtype,
        weights=forward.weights,
        vocab_size=forward.vocab_size,
        max_model_len=engine.max_len,
        num_slots=forward.num_slots,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        prompt_logprobs_with_prefix_cache=True,
        stages=("raw_logprobs", "processed_logprobs"),
        speculate=bool(config.scheduler_config.speculate),
        draft_model=config.scheduler_config.draft_model,
        layout=forward.layout,
        weight_version=version,
        quantization=quantization(files),
        shape=forward.shape,
    )
    if weight_version(files) != version:
        raise ModelError(f"{files.folder}: its weights changed while they were read; load the model again")
    keep_out_of_collections()
    if forward.device == "cpu" and forward.kv_bytes > free_bytes():
        logger.warning(
            "kv_cache_memory_bytes: a KV cache of %s exceeds the %s of free memory; once it fills up, the "
            "weights are evicted from memory and steps wait for the disk; reduce kv_cache_memory_bytes",
            in_words(forward.kv_bytes),
            in_words(free_bytes()),
        )
    logger.info("%s: %s", files.name, _what_it_took(forward, runtime.perf_counter() - began))
    return NativeParts(engine, capabilities, text, eos_token_ids, forward.kv_bytes)


def _load_drafter(config: EngineConfig, forward: NativeForward, text: TextEdge) -> DraftModel:
    """Load the draft model of a configuration, for the model in `forward`.

    Raises:
        ModelError: the draft model cannot be loaded.
        ParameterError: the draft model has another tokenizer than the model.
    """
    from logprobe.engine.draft_model import DraftModel

    name = config.scheduler_config.draft_model
    assert name is not None
    files = resolve(name)
    remedy = f"{files.name} has another tokenizer than the model; use a draft model with its tokenizer"
    require(same_tokens(text, text_edge(files)), "speculate", remedy)
    cache = CacheConfig(kv_cache_memory_bytes=max(forward.kv_bytes // DRAFT_SHARE, MIN_DRAFT_BYTES))
    small = EngineConfig(model=name, device=config.device, cache_config=cache)
    return DraftModel(NativeForward(small, files), files.name, forward.shape, forward.vocab_size)


def text_edge(files: ModelFiles) -> TextEdge:
    """Load a model's tokenizer and the bytes of its tokens, without transformers if possible.

    Raises:
        ModelNotFoundError: there is no `tokenizer.json`.
        UnsupportedModelError: a tokenizer file cannot be read.
        MissingPackageError: the tokenizer needs transformers, which is not installed.
    """
    with reading_errors(f"{files.name}: its tokenizer"):
        fast = read_fast_tokenizer(files.folder)
        if isinstance(fast, FastTokenizer):
            return TextEdge.of_fast(fast, partial(_load_tokenizer, files))
        if find_spec("transformers") is None:
            raise MissingPackageError(
                f"{files.name}: {fast} of its {SETTINGS} needs transformers; pip install 'logprobe[torch]'"
            )
        return TextEdge.of(_load_tokenizer(files))


def _load_tokenizer(files: ModelFiles) -> Any:
    with quiet_transformers():
        return load_tokenizer(files)


def _what_it_took(forward: NativeForward, seconds: float) -> str:
    """Describe a load's duration and memory use in one line."""
    resident = resident_bytes()
    memory = "" if resident is None else f", {resident / 1e6:.0f} MB resident"
    way = "loaded from cache" if forward.is_recalled else "loaded and verified"
    pool = in_words(forward.kv_bytes)
    if forward.device == "cpu":
        pool += f" of {in_words(free_bytes())} free memory"
    room = f"KV cache holds {forward.num_slots} tokens ({pool})"
    return f"{way} in {seconds:.1f} s{memory}; {forward.weights} weights; {room}"


def _eos_token_ids(forward: NativeForward, text: TextEdge) -> frozenset[int]:
    """Return all end-of-sequence ids, from the model's settings and the tokenizer."""
    own = text.eos_token_id
    return forward.eos_token_ids | (frozenset() if own is None else {own})
