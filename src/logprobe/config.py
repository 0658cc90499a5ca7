"""`EngineConfig`: the frozen settings of an engine, and a decorator that rejects unknown keywords."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

from logprobe.errors import ParameterError, UnknownParameterError, require
from logprobe.ignored_kwargs import CLASSES, SWITCH

if TYPE_CHECKING:
    from collections.abc import Collection

T = TypeVar("T")

logger = logging.getLogger("logprobe")


def strict_keywords(cls: type[T]) -> type[T]:
    """Make a keyword-only dataclass reject unknown keywords with an error that names the nearest known one.

    Keywords from other programs that have no effect here are accepted (`ignored_kwargs`).
    """
    init = cls.__init__
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]  # always a dataclass

    @functools.wraps(init)
    def checked_init(self: T, *args: Any, **kwargs: Any) -> None:
        if not kwargs.keys() <= known:
            kwargs = _without_ignored(kwargs, known, of=cls.__name__)
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
    logger.warning("%s changes nothing here: %s", name, reason)


ENGINES: Final = {"vllm": "logprobe.integrations.vllm.start:start_vllm_engine"}
"""Additional engines by name, each with the `module:function` that starts it, which is imported when used."""
Weights = Literal["auto", "plain", "checkpoint"]
Arithmetic = Literal["auto", "fma", "bf16x3", "bf16"]
KVDtype = Literal["float32", "bfloat16"]
DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
OTHER_DTYPES: Final = {"half": "float16", "float": "float32"}


@strict_keywords
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of an engine.

    Args:
        model: a known name (`smollm2`), a Hugging Face id, a local folder, or a `.gguf` file.
        device: `auto` (a GPU if there is one), `cpu`, or `cuda` (the first visible GPU; the environment
            variable `CUDA_VISIBLE_DEVICES` chooses another one).
        dtype: `auto` (float32; bfloat16 if transformers' modules run the model on a GPU), `float32`,
            `bfloat16`, or `float16`; torch dtypes and their names are accepted as well.
        max_model_len: maximum sequence length in tokens; `None`: the model's context.
        max_batch_tokens: maximum number of tokens per step.
        max_batch_rows: maximum number of requests that run concurrently.
        kv_bytes: size of the KV cache, including its hidden states, in bytes; `None`: a quarter of the memory
            that the weights leave free, at most 1 GiB; on a GPU 70 % of it.
        weights: `auto` (`checkpoint` in float32 on a CPU where the native kernels run, else `plain`),
            `checkpoint` (weights stay in memory as in the model's file, or in the narrowest float type that
            represents them exactly, and are converted to float32 as they are used), or `plain` (transformers'
            own modules).
        arithmetic: how products with weights are computed. On a CPU `fma` (float32 fused multiply-adds); on a
            GPU `bf16x3` (each float32 activation as three bfloat16 numbers on tensor cores, accurate to
            float32) or `bf16` (activations rounded to bfloat16: faster for long prompts, less accurate).
            `auto`: `fma`, or `bf16x3`.
        kv_dtype: dtype of cached keys and values: `float32`, or on a GPU `bfloat16` (half the memory, less
            accurate).
        seed: base seed for requests without a seed.
        overlap: run the next step while the results of the last one are copied and delivered; the results do
            not change.
        speculate: guess the next tokens of a text that repeats itself or its prompt, and verify several in
            one step; the results do not change.
        batch_invariant: reject a model whose results depend on the other requests in a batch. On a CPU, model
            families that run without transformers' modules give bit-identical results, with or without this
            option, in any batch, however a prompt is chunked or cached, and when sampled tokens are scored
            again.
        logits_processors: processors that requests may use with `logits_processors_args`, in order of
            execution: names of built-ins or entry points, `module.path:ClassName` (also searched in the
            current folder), or classes; a string may list several names, separated by commas.
        process: run the engine in a separate process, so that it does not share an interpreter with this one.
        data_parallel: number of engine processes, among which the threads are divided. Each has a KV cache of
            `kv_bytes` (`None`: all processes share the default size), and each request runs on one of them. 2
            or more imply `process`.
        engine: `native`, or `vllm` (extra `vllm`).
        engine_options: vLLM's engine options, such as `tensor_parallel_size`; a dict or a JSON string.
    """

    model: str = "smollm2"
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_batch_tokens: int = 512
    max_batch_rows: int = 64
    kv_bytes: int | None = None
    weights: Weights = "auto"
    arithmetic: Arithmetic = "auto"
    kv_dtype: KVDtype = "float32"
    seed: int = 0
    overlap: bool = False
    speculate: bool = False
    batch_invariant: bool = False
    logits_processors: tuple[str | type, ...] | list[str | type] = ()
    process: bool = False
    data_parallel: int = 1
    engine: str = "native"
    engine_options: Mapping[str, Any] | str | None = None

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
        require(self.dtype in DTYPES, "dtype", f"must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        weights = ("auto", "plain", "checkpoint")
        require(
            self.weights in weights, "weights", f"must be one of {', '.join(weights)}, got {self.weights!r}"
        )
        for name, kind in (("arithmetic", Arithmetic), ("kv_dtype", KVDtype)):
            value, known = getattr(self, name), get_args(kind)
            require(value in known, name, f"must be one of {', '.join(known)}, got {value!r}")
        for name in ("max_model_len", "kv_bytes"):
            value = getattr(self, name)
            is_limit = value is None or (_is_int(value) and value > 0)
            require(is_limit, name, f"must be a positive integer or None, got {value!r}")
        for name in ("max_batch_tokens", "max_batch_rows", "data_parallel"):
            value = getattr(self, name)
            require(_is_int(value) and value > 0, name, f"must be a positive integer, got {value!r}")
        for name in ("overlap", "speculate", "process"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, f"must be True or False, got {value!r}")
        engines = ("native", *ENGINES)
        require(self.engine in engines, "engine", f"must be one of {', '.join(engines)}, got {self.engine!r}")
        object.__setattr__(self, "engine_options", _options(self.engine_options))
        has_options = self.engine in ENGINES or self.engine_options is None
        remedy = f"use engine={' or '.join(map(repr, ENGINES))}, or leave them out"
        require(has_options, "engine_options", f"are not supported by the native engine; {remedy}")
        require(_is_int(self.seed), "seed", f"must be an integer, got {self.seed!r}")
        is_name = isinstance(self.model, str) and self.model
        require(is_name, "model", "must be a name or a path", got=self.model)


def _check_device(device: str) -> None:
    name, _, index = device.partition(":")
    if name == "mps":
        remedy = "the kernels run on CPUs and NVIDIA GPUs; use cpu"
        raise ParameterError("device", f"mps is not supported: {remedy}")
    if name == "cuda" and index not in {"", "0"} and index.isdecimal():
        remedy = f"set CUDA_VISIBLE_DEVICES={index} and use device='cuda'"
        raise ParameterError("device", f"{device} is not supported: the first visible GPU is used; {remedy}")
    is_known = device in {"auto", "cpu", "cuda", "cuda:0"}
    require(is_known, "device", f"must be auto, cpu, cuda or cuda:0, got {device!r}")


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
    """Split a text at commas; empty names, as in "a," from a list with spaces, are dropped."""
    names = [name.strip() for name in text.split(",")]
    return names if len(names) == 1 else [name for name in names if name]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
