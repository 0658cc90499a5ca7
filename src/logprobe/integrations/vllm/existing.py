"""Wrap a vLLM engine that the caller has created, and return the options with which to create one."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final
from weakref import proxy, ref

from logprobe.config import EngineConfig
from logprobe.engine.backends.bridge import LoopThread
from logprobe.errors import require
from logprobe.integrations.vllm.offline import OfflineClient
from logprobe.integrations.vllm.orders import SETTINGS
from logprobe.integrations.vllm.start import (
    adopt,
    check_settings,
    engine_args,
    telling_refusals,
    worker_settings,
)
from logprobe.internals import VLLM_PROCESSORS, VLLM_WORKER
from logprobe.models import resolve

if TYPE_CHECKING:
    from logprobe.engine.backends.start import LoadedModel

WHERE: Final = "llm_engine"


@final
class BorrowedClient:
    """An `AsyncLLM` owned by the caller; `shutdown` only drops the reference to the engine."""

    def __init__(self, llm: Any) -> None:
        self._llm: Any = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def shutdown(self) -> None:
        """Drop the reference; the owner shuts the engine down."""
        self._llm = None


def options_of(config: EngineConfig) -> dict[str, Any]:
    """Return options for `vllm.LLM(**options)` or `AsyncEngineArgs(**options)`, for use in `existing_engine`.

    Raises:
        ImportError: vLLM is not installed.
        ModelError: the model cannot be loaded.
        ParameterError: an option is unknown or cannot be set.
    """
    args = engine_args(config, resolve(config.model))
    defaults = type(args)(model=args.model)
    changed = {field.name: getattr(args, field.name) for field in fields(args)}
    return {"model": args.model} | {
        name: value for name, value in changed.items() if value != getattr(defaults, name)
    }


def existing_engine(llm: Any, *, is_owned: bool = False) -> LoadedModel:
    """Wrap a running `vllm.LLM` or `AsyncLLM` in a `Front`.

    If the worker runs in this process, our logits processor is added to it; otherwise the engine must have
    been created with this processor. With `is_owned`, closing the `Front` also ends a `vllm.LLM`.

    Raises:
        EngineError: the rows of our logits processor differ from those that vLLM returns.
        ParameterError: `llm` is not a vLLM engine, was created without this library's processor, or belongs
            to a running event loop.
    """
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM

    is_offline = isinstance(llm, LLM)
    is_known = is_offline or isinstance(llm, AsyncLLM)
    require(is_known, WHERE, "must be a vllm.LLM, an AsyncLLM or an open logprobe.LLM", got=llm)
    vllm_config = (llm.llm_engine if is_offline else llm).vllm_config
    worker = _along(llm, VLLM_WORKER)
    if not _is_fitted_out(vllm_config) and _along(worker, VLLM_PROCESSORS) is not None:
        _fit_out(worker, vllm_config)
    remedy = (
        "lacks logprobe's logits processor; create it with vllm.LLM(**AsyncVirtualLM.engine_options(model))"
    )
    require(_is_fitted_out(vllm_config), WHERE, remedy)
    is_free = is_offline or llm.output_handler is None
    owned = "belongs to a running event loop; create it outside of one: await asyncio.to_thread(create)"
    require(is_free, WHERE, owned)
    config = EngineConfig(engine="vllm", **vllm_config.additional_config[SETTINGS]["config"])
    client: Any = OfflineClient(llm, is_owned=is_owned) if is_offline else BorrowedClient(llm)
    bridge = LoopThread()
    model_config = vllm_config.model_config
    max_logprobs, model_config.max_logprobs = (
        model_config.max_logprobs,
        -1,
    )  # `check_routes` requests a whole row
    try:
        # The owner may have replaced the weights, so their version is not known.
        loaded = adopt(client, bridge, config, replace(resolve(config.model), version=None))
    except BaseException:
        client.shutdown()
        bridge.close()
        raise
    finally:
        model_config.max_logprobs = max_logprobs
    return loaded if worker is None else replace(loaded, load_module=partial(_module_of, ref(worker)))


def new_llm(config: EngineConfig) -> Any:
    """Create a `vllm.LLM` with our logits processor.

    Raises:
        ImportError: vLLM is not installed.
        ModelError: the model cannot be loaded, or vLLM cannot run it.
        ParameterError: vLLM rejects an option, or this library does not support it.
    """
    from vllm import LLM

    check_settings(config)
    options = options_of(config)
    with telling_refusals(config.model):
        return LLM(**options)


def runs_here() -> bool:
    """Return True if vLLM runs a `vllm.LLM` in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`)."""
    from vllm import envs

    return not envs.VLLM_ENABLE_V1_MULTIPROCESSING


def watchers(llm: Any) -> list[Any]:
    """Return vLLM's list of argmax-invariant processors in this process; empty if vLLM runs elsewhere."""
    processors = _along(llm, (*VLLM_WORKER, *VLLM_PROCESSORS))
    return [] if processors is None else processors.argmax_invariant


def _is_fitted_out(vllm_config: Any) -> bool:
    extra = vllm_config.additional_config
    return isinstance(extra, dict) and SETTINGS in extra


def _fit_out(worker: Any, vllm_config: Any) -> None:
    """Add the settings, processor and worker extension to a worker that vLLM started without them."""
    from logprobe.integrations.vllm.worker import LogprobeLogitsProcessor, RowsExtension

    model = vllm_config.model_config
    is_alone = vllm_config.speculative_config is None
    require(
        is_alone,
        WHERE,
        "uses speculative decoding, which is not supported; create it without speculative_config",
    )
    require(
        model.tokenizer == model.model,
        WHERE,
        "has a tokenizer other than the model's own; create the engine without the option tokenizer",
    )
    files = resolve(model.model)
    dtype, device = str(model.dtype).removeprefix("torch."), vllm_config.device_config.device_type
    config = EngineConfig(engine="vllm", model=str(files.folder), seed=model.seed)
    settings = worker_settings(config, files, dtype, device)
    for held in (vllm_config, worker.vllm_config):
        held.additional_config[SETTINGS] = settings
    processor = LogprobeLogitsProcessor(worker.vllm_config)
    _along(worker, VLLM_PROCESSORS).non_argmax_invariant.append(processor)
    borrowed: Any = proxy(worker)  # a reference would keep the worker alive
    worker.logprobe_take = partial(RowsExtension.logprobe_take, borrowed)


def _module_of(worker: ref[Any]) -> Any:
    """Return the module that a worker runs; None if the engine was freed."""
    alive = worker()
    return None if alive is None else alive.get_model()


def _along(start: Any, names: tuple[str, ...]) -> Any:
    """Return a nested attribute; None if one of the attributes on the way does not exist."""
    for name in names:
        start = getattr(start, name, None)
    return start
