"""`EngineConfig` and its groups: the frozen settings of an engine; unknown keywords are rejected."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, TypeVar, get_args

from logprobe.errors import ParameterError, UnknownParameterError, require
from logprobe.ignored_kwargs import CLASSES, SWITCH

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from dataclasses import Field
    from typing import Unpack

    import torch

T = TypeVar("T")

logger = logging.getLogger("logprobe")


def strict_keywords(cls: type[T]) -> type[T]:
    """Make a keyword-only dataclass reject unknown keywords with an error that names the nearest known one.

    A field whose default is a dataclass is a group. The fields of a group are keywords as well, and override
    the group's values. Keywords from other programs that have no effect here are accepted (`ignored_kwargs`).
    """
    init: Callable[..., None] = cls.__init__
    own: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]  # always a dataclass
    groups = {field.name: field.default for field in own if is_dataclass(field.default)}
    names = {name: {field.name for field in fields(group)} for name, group in groups.items()}
    known = {field.name for field in own}.union(*names.values())

    @functools.wraps(init)
    def checked_init(self: T, *args: Any, **kwargs: Any) -> None:
        if not kwargs.keys() <= known:
            kwargs = _without_ignored(kwargs, known, of=cls.__name__)
        for name, default in groups.items():
            group = kwargs.setdefault(name, default)
            require(isinstance(group, type(default)), name, f"must be a {type(default).__name__}", got=group)
            flat = {key: kwargs.pop(key) for key in kwargs.keys() & names[name]}
            if flat:
                kwargs[name] = replace(group, **flat)
        init(self, *args, **kwargs)

    cls.__init__ = checked_init  # type: ignore[method-assign,assignment]
    return cls


def _without_ignored(kwargs: Mapping[str, Any], known: Collection[str], *, of: str) -> dict[str, Any]:
    """Return the keywords in `known`; ignored keywords are dropped, with a warning the first time.

    Raises:
        ParameterError: a keyword from another program has a value that is not supported here.
        UnknownParameterError: a keyword is unknown.
    """
    engine = kwargs.get("engine", "native")
    for name, value in kwargs.items():
        if name in known:
            continue
        keyword = CLASSES.get(of, {}).get(name)
        if keyword is None or keyword.use:
            raise UnknownParameterError(name, known, of=of)
        if engine != "native":
            raise ParameterError(
                name, f"must be passed to engine={engine!r} as engine_options={{{name!r}: ...}}"
            )
        if not keyword.accepts(value):
            values = " or ".join(map(repr, keyword.accepted or ()))
            raise ParameterError(name, f"must be {values}, got {value!r:.60}: {keyword.reason}")
        if keyword.accepted in (None, SWITCH):
            _warn_ignored(name, keyword.reason)
    return {name: value for name, value in kwargs.items() if name in known}


@functools.cache
def _warn_ignored(name: str, reason: str) -> None:
    logger.warning("%s has no effect in logprobe: %s", name, reason)


ENGINES: Final = {"vllm": "logprobe.integrations.vllm.start:start_vllm_engine"}
"""Additional engines by name, each with the `module:function` that starts it, which is imported when used."""
Weights = Literal["auto", "plain", "checkpoint"]
Arithmetic = Literal["auto", "fma", "bf16x3", "bf16"]
KVDtype = Literal["auto", "float32", "bfloat16"]
DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
OTHER_DTYPES: Final = {"half": "float16", "float": "float32"}


def _check_choice(config: object, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    require(value in choices, name, f"must be one of {', '.join(choices)}, got {value!r}")


def _check_limit(config: object, name: str) -> None:
    value = getattr(config, name)
    is_limit = value is None or (_is_int(value) and value > 0)
    require(is_limit, name, f"must be a positive integer or None, got {value!r}")


def _check_count(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(_is_int(value) and value > 0, name, f"must be a positive integer, got {value!r}")


SPECULATE: Final = {"lookup": True, "off": False}
DRAFT_MODEL: Final = "model:"


def _check_switch(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(isinstance(value, bool), name, f"must be True or False, got {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@strict_keywords
@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The KV cache.

    Args:
        kv_cache_memory_bytes: size in bytes of the KV cache, which also holds each token's final hidden
            state. `None`: on a CPU, a quarter of the memory that the weights leave free, at most 1 GiB; on a
            GPU, 70 % of the memory that the weights leave free.
        kv_cache_dtype: dtype of cached keys and values: `float32` (`auto` means the same), or on a GPU
            `bfloat16` (half the memory, less accurate).
    """

    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: KVDtype = "float32"

    def __post_init__(self) -> None:
        _check_limit(self, "kv_cache_memory_bytes")
        _check_choice(self, "kv_cache_dtype", get_args(KVDtype))
        if self.kv_cache_dtype == "auto":
            object.__setattr__(self, "kv_cache_dtype", "float32")


@strict_keywords
@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Batching: the size of a step, and whether steps overlap or are speculative.

    Args:
        max_num_batched_tokens: maximum number of tokens per step.
        max_num_seqs: maximum number of requests that run at once.
        async_scheduling: run the next step while the previous step's results are copied and delivered; the
            results do not change.
        speculate: guess the next tokens, and verify several in one step; neither the sampled tokens nor other
            results change. True or `lookup` takes the guesses from repetitions in the text; `model:NAME` also
            takes them from a second, smaller model with the same tokenizer; False or `off` guesses nothing.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    async_scheduling: bool = False
    speculate: bool | str = False

    def __post_init__(self) -> None:
        _check_count(self, "max_num_batched_tokens", "max_num_seqs")
        _check_switch(self, "async_scheduling")
        if isinstance(self.speculate, str) and self.speculate in SPECULATE:
            object.__setattr__(self, "speculate", SPECULATE[self.speculate])
        is_name = isinstance(self.speculate, str) and self.speculate.removeprefix(DRAFT_MODEL).strip()
        is_model = is_name and str(self.speculate).startswith(DRAFT_MODEL)
        remedy = "must be True, False, lookup, off, or model: and the name of a draft model"
        require(isinstance(self.speculate, bool) or is_model, "speculate", remedy, got=self.speculate)

    @property
    def draft_model(self) -> str | None:
        """Name of the draft model; None if there is none."""
        return self.speculate.removeprefix(DRAFT_MODEL).strip() if isinstance(self.speculate, str) else None


@strict_keywords
@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Engine processes.

    Args:
        process: run the engine in a separate process, so that it does not share the caller's interpreter.
        data_parallel_size: number of engine processes, each with its share of the threads and a KV cache of
            `kv_cache_memory_bytes` (`None`: together, the caches get a quarter of the free memory); each
            request runs on one of them. 2 or more imply `process`.
    """

    process: bool = False
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        _check_count(self, "data_parallel_size")
        _check_switch(self, "process")


@strict_keywords
@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """How weights are stored in memory, and how products with them are computed.

    Args:
        weights: `checkpoint` keeps weights in memory as in the model's file, or in the narrowest float type
            that represents them exactly, and converts them to float32 during computation. `plain` uses
            transformers' own modules. `auto` is `checkpoint` if the logits are float32 and either the CPU has
            native kernels or the GPU decoder can run the model, else `plain`.
        arithmetic: how products with weights are computed. `fma`: float32 fused multiply-adds (CPUs).
            `bf16x3`: each float32 activation is split into three bfloat16 numbers, for the tensor cores of a
            GPU or the AMX units of an x86-64 CPU; as accurate as float32. CPUs without AMX emulate it: the
            same bits, but slower than `fma`. `bf16`: activations are rounded to bfloat16 (GPUs); faster for
            long prompts, less accurate. `auto`: `fma` on a CPU, `bf16x3` on a GPU.
    """

    weights: Weights = "auto"
    arithmetic: Arithmetic = "auto"

    def __post_init__(self) -> None:
        _check_choice(self, "weights", get_args(Weights))
        _check_choice(self, "arithmetic", get_args(Arithmetic))


class EngineSettings(TypedDict, total=False):
    """The keywords of `EngineConfig` except `model`, for type checkers."""

    device: str | torch.device
    dtype: str | torch.dtype
    max_model_len: int | None
    seed: int
    batch_invariant: bool
    logits_processors: tuple[str | type, ...] | list[str | type]
    engine: str
    engine_options: Mapping[str, Any] | str | None
    cache_config: CacheConfig
    kv_cache_memory_bytes: int | None
    kv_cache_dtype: KVDtype
    scheduler_config: SchedulerConfig
    max_num_batched_tokens: int
    max_num_seqs: int
    async_scheduling: bool
    speculate: bool | str
    parallel_config: ParallelConfig
    process: bool
    data_parallel_size: int
    load_config: LoadConfig
    weights: Weights
    arithmetic: Arithmetic


@strict_keywords
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of an engine.

    The fields of a group (such as `scheduler_config`) are also keywords, and override the group's values:
    `EngineConfig(max_num_seqs=8)` is `EngineConfig(scheduler_config=SchedulerConfig(max_num_seqs=8))`.

    Args:
        model: a known name (`smollm2`), a Hugging Face id, a local folder, or a `.gguf` file.
        device: `auto` (a GPU if there is one), `cpu`, `cuda` (the first visible GPU), or `cuda:N` (the one
            with index N).
        dtype: `auto` (float32; bfloat16 if transformers' modules run the model on a GPU), `float32`,
            `bfloat16`, or `float16`; torch dtypes and their names are accepted as well.
        max_model_len: maximum sequence length in tokens; `None`: the model's context.
        seed: base seed for requests without a seed.
        batch_invariant: reject a model whose results depend on the other requests in a batch. On a CPU, model
            families that run without transformers' modules are batch-invariant with or without this option:
            a token's results have the same bits in any batch, with any prompt chunks, with or without cached
            prefixes, and whether the token is sampled or scored.
        logits_processors: processors that requests may use with `logits_processors_args`, in order of
            execution: names of built-ins or entry points, `module.path:ClassName` (also searched in the
            current folder), or classes; a string may list several names, separated by commas.
        engine: `native`, or `vllm` (extra `vllm`).
        engine_options: vLLM's engine options, such as `tensor_parallel_size`; a dict or a JSON string.
        cache_config: the KV cache.
        scheduler_config: batching.
        parallel_config: engine processes.
        load_config: storage of weights, and arithmetic of products with them.
    """

    model: str = "smollm2"
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    seed: int = 0
    batch_invariant: bool = False
    logits_processors: tuple[str | type, ...] | list[str | type] = ()
    engine: str = "native"
    engine_options: Mapping[str, Any] | str | None = None
    cache_config: CacheConfig = CacheConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    parallel_config: ParallelConfig = ParallelConfig()
    load_config: LoadConfig = LoadConfig()

    if TYPE_CHECKING:

        def __init__(self, *, model: str = ..., **settings: Unpack[EngineSettings]) -> None: ...

    def __post_init__(self) -> None:
        is_list = isinstance(self.logits_processors, tuple | list)
        require(is_list, "logits_processors", f"must be a list, got {self.logits_processors!r}")
        # Names contain no commas, so a flag or environment variable can list several.
        parts = [_names_in(one) if isinstance(one, str) else [one] for one in self.logits_processors]
        processors = tuple(one for part in parts for one in part)
        object.__setattr__(self, "logits_processors", processors)
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        _check_device(str(self.device))
        object.__setattr__(self, "device", str(self.device).removesuffix(":0"))
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", OTHER_DTYPES.get(dtype, dtype))
        _check_choice(self, "dtype", DTYPES)
        _check_limit(self, "max_model_len")
        _check_choice(self, "engine", ("native", *ENGINES))
        object.__setattr__(self, "engine_options", _options(self.engine_options))
        has_options = self.engine in ENGINES or self.engine_options is None
        remedy = f"use engine={' or '.join(map(repr, ENGINES))}, or leave them out"
        require(has_options, "engine_options", f"are not supported by the native engine; {remedy}")
        require(_is_int(self.seed), "seed", f"must be an integer, got {self.seed!r}")
        is_name = isinstance(self.model, str) and self.model
        require(is_name, "model", "must be a name or a path", got=self.model)

    def keywords(self) -> dict[str, Any]:
        """Return all settings as keywords, with the fields of the groups in place of the groups."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        groups = [own.pop(name) for name, value in [*own.items()] if is_dataclass(value)]
        return own | {field.name: getattr(group, field.name) for group in groups for field in fields(group)}


def _check_device(device: str) -> None:
    if device.partition(":")[0] == "mps":
        remedy = "the kernels run on CPUs and NVIDIA GPUs; use cpu"
        raise ParameterError("device", f"mps is not supported: {remedy}")
    is_known = re.fullmatch("auto|cpu|cuda(:(0|[1-9][0-9]*))?", device)
    require(is_known, "device", f"must be auto, cpu, cuda or cuda:N, got {device!r}")


def _options(given: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    """Parse engine options from a mapping or a JSON text."""
    name = "engine_options"
    try:
        options = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ParameterError(name, f"is not valid JSON: {error}") from error
    is_dict = options is None or (
        isinstance(options, Mapping) and all(isinstance(key, str) for key in options)
    )
    require(is_dict, name, "must map names to values, such as {'enable_lora': true}", got=given)
    return None if options is None else dict(options)


def _names_in(text: str) -> list[str]:
    """Split a text at commas; drop empty names if there are several (`a,`, from `a, b` as two words)."""
    names = [name.strip() for name in text.split(",")]
    return names if len(names) == 1 else [name for name in names if name]
