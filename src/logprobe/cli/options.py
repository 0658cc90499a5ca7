"""Options that several commands have, and the decorator for groups of options."""

from __future__ import annotations

import functools
import gc
import inspect
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from logprobe.config import EngineConfig
from logprobe.models import DEFAULT_MODEL, KNOWN_MODELS, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe.llm import LLM

__all__ = [
    "DEFAULT_MODEL",
    "MODEL_HELP",
    "BosOption",
    "EngineFlags",
    "JsonOption",
    "LoadFlags",
    "ModelFlags",
    "complete_model",
    "few_collections",
    "field_names",
    "open_llm",
    "say_loading",
    "with_groups",
]


def complete_model(incomplete: str) -> list[str]:
    """Return the known models whose names begin with `incomplete`, for shell completion."""
    return [name for name in KNOWN_MODELS if name.startswith(incomplete)]


_model = functools.partial(typer.Option, rich_help_panel="Model")
_speed = functools.partial(typer.Option, rich_help_panel="Memory and speed")

MODEL_HELP = "Name of a known model, local folder, .gguf file, or Hugging Face repository id."
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of tables.", rich_help_panel="Output")
]
BosOption = Annotated[
    bool | None,
    typer.Option(
        "--bos/--no-bos",
        help="Start each text with BOS, or not; default: as the tokenizer does.",
        rich_help_panel="Input",
    ),
]


@dataclass(frozen=True, kw_only=True)
class _NamedModel:
    model: Annotated[str, _model(help=MODEL_HELP, autocompletion=complete_model)] = DEFAULT_MODEL


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """Options of every command that loads a model; each is a field of `EngineConfig`."""

    device: Annotated[str, _model(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[
        str,
        _model(
            help="auto (float32; bfloat16 if transformers' modules run the model on a GPU), float32, "
            "bfloat16 or float16."
        ),
    ] = "auto"
    kv_cache_memory_bytes: Annotated[
        int | None,
        _model(
            help="Size of the KV cache in bytes. By default, on a CPU a quarter of the memory that the "
            "weights leave free, at most 1 GiB; on a GPU 70 % of that memory.",
        ),
    ] = None
    weights: Annotated[
        str,
        _model(
            help="checkpoint (keep the precision of the model's file), plain (transformers' own modules), "
            "or auto (checkpoint if logits are float32 and either the CPU has native kernels or the GPU "
            "decoder can run the model, else plain)."
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class ModelFlags(LoadFlags, _NamedModel):
    """Options of commands that load one model; without a name, the default model."""

    @contextmanager
    def open(self) -> Iterator[LLM]:
        """Load the model, and close it afterwards; raises the errors of `open_llm`."""
        with open_llm(**vars(self)) as llm:
            yield llm


@dataclass(frozen=True, kw_only=True)
class EngineFlags(LoadFlags):
    """All fields of `EngineConfig` except `model`."""

    max_model_len: Annotated[
        int | None, _model(help="Maximum sequence length in tokens; by default the model's context.")
    ] = None
    arithmetic: Annotated[
        Literal["auto", "fma", "bf16x3", "bf16"],
        _model(
            help="Matrix products. fma: float32 fused multiply-adds (on a CPU). bf16x3: each float32 "
            "activation as three bfloat16 numbers on tensor cores, or on a CPU with AMX, as accurate as "
            "float32. bf16: activations rounded to bfloat16 (on a GPU), faster for long prompts, less "
            "accurate. auto: fma on a CPU, bf16x3 on a GPU."
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        _model(
            help="Data type of cached keys and values; bfloat16 (on a GPU) takes half the memory and is less "
            "accurate. auto: float32.",
        ),
    ] = "float32"
    seed: Annotated[int, _model(help="Base seed for requests without a seed.")] = 0
    logits_processors: Annotated[
        tuple[str, ...],
        _model(
            help="Processor that requests may use: a built-in, an entry point, or module.path:ClassName "
            "(also searched for in the current directory). Repeat the flag, or separate names by commas; "
            "they run in this order."
        ),
    ] = ()
    batch_invariant: Annotated[
        bool, _model(help="Reject a model whose results depend on the other requests in a batch.")
    ] = False
    engine: Annotated[str, _model(help="native, or vllm (extra vllm).")] = "native"
    engine_options: Annotated[
        str | None, _model(help="vLLM's engine options as JSON, such as '{\"tensor_parallel_size\": 2}'.")
    ] = None
    max_num_batched_tokens: Annotated[
        int,
        _speed(help="Maximum number of tokens per step."),
    ] = 512
    max_num_seqs: Annotated[int, _speed(help="Maximum number of requests that run at once.")] = 64
    async_scheduling: Annotated[
        bool,
        _speed(
            help="Run the next step while the previous step's results are copied and delivered; the results "
            "do not change.",
        ),
    ] = False
    speculate: Annotated[
        str,
        _speed(
            help="Guess the next tokens, and verify several in one step; the results do not change. lookup: "
            "guess from repetitions in the text. model:NAME: also from a smaller model with the same "
            "tokenizer. off: do not guess."
        ),
    ] = "off"
    process: Annotated[
        bool, _speed("--engine-process/--no-engine-process", help="Run the engine in a process of its own.")
    ] = False
    data_parallel_size: Annotated[
        int,
        _speed(
            help="Number of engine processes, each with its share of the threads and its own KV cache; "
            "each request runs on one of them.",
        ),
    ] = 1


def say_loading(model: str) -> None:
    """Print on standard error that a model is being loaded, with its title if it is a known model."""
    known = KNOWN_MODELS.get(model)
    title = "" if known is None else f" ({known.title})"
    typer.echo(f"loading {model}{title} …", err=True)


@contextmanager
def open_llm(model: str, **settings: Any) -> Iterator[LLM]:
    """Load a model, and close it afterwards; `settings` are fields of `EngineConfig`.

    Raises:
        ModelError: the model cannot be loaded.
        ParameterError: a setting is invalid.
    """
    EngineConfig(model=model, **settings)
    resolve(model)  # reject an unknown name before slow imports
    say_loading(model)
    with few_collections():
        from logprobe.llm import LLM

        llm = LLM(model, **settings)
    with llm:
        yield llm


@contextmanager
def few_collections() -> Iterator[None]:
    """Collect garbage rarely in this block, which imports modules or loads a model; else it takes 30 ms."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options: parameters whose type is a dataclass.

    Each field that is annotated with a `typer.Option` or `typer.Argument` is an option of the command.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, own in inspect.signature(command).parameters.items():
        parameters += _options_of(groups[name]) if name in groups else [own.replace(annotation=hints[name])]

    @functools.wraps(command)
    def called(**values: Any) -> None:
        for name, group in groups.items():
            own = {option.name: values.pop(option.name) for option in _options_of(group)}
            lists = {name: tuple(value) for name, value in own.items() if isinstance(value, list)}
            values[name] = group(**own | lists)
        command(**values)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def field_names(group: type) -> dict[str, str]:
    """Return the field's name for each flag of a group; the flags have no leading dashes."""
    names = {}
    for parameter in _options_of(group):
        flag = parameter.annotation.__metadata__[
            0
        ].default  # the name of a flag is its "default" in Annotated
        name = flag.partition("/")[0] if isinstance(flag, str) else parameter.name.replace("_", "-")
        names[name.removeprefix("--")] = parameter.name
    return names


def _options_of(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    made = []
    for field in fields(group):
        hint, default = hints[field.name], field.default
        if not hasattr(hint, "__metadata__"):
            continue
        if isinstance(default, tuple):  # typer has lists only
            hint, default = Annotated[list[str], *hint.__metadata__], list(default)
        made.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        )
    return made
