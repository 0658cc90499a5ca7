"""An engine of vLLM's that somebody else has started: what it is started with, and how it is taken in."""

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
    """An `AsyncLLM` that stays its owner's; after `shutdown` nothing here refers to it."""

    def __init__(self, llm: Any) -> None:
        self._llm: Any = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def shutdown(self) -> None:
        """Drop the reference; the owner ends it."""
        self._llm = None


def options_of(config: EngineConfig) -> dict[str, Any]:
    """What `vllm.LLM(**options)` or `AsyncEngineArgs(**options)` must be given for `existing_engine`.

    Raises:
        ImportError: vLLM is missing.
        ModelError: the model cannot be had.
        ParameterError: an option that does not exist, or cannot be set.
    """
    args = engine_args(config, resolve(config.model))
    defaults = type(args)(model=args.model)
    changed = {field.name: getattr(args, field.name) for field in fields(args)}
    return {"model": args.model} | {
        name: value for name, value in changed.items() if value != getattr(defaults, name)
    }


def existing_engine(llm: Any, *, is_owned: bool = False) -> LoadedModel:
    """Put a running `vllm.LLM` or `AsyncLLM` behind a `Front`; closing that ends an LLM if it `is_owned`.

    An LLM whose worker runs in this process is given what captures rows; others were made with it.

    Raises:
        EngineError: rows captured in vLLM's workers are not vLLM's own.
        ParameterError: it is neither, was made without this library's processor, or belongs to a loop.
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
        "was made without what captures rows; make it as vllm.LLM(**AsyncVirtualLM.engine_options(model))"
    )
    require(_is_fitted_out(vllm_config), WHERE, remedy)
    is_free = is_offline or llm.output_handler is None
    owned = "belongs to a running event loop; make it outside of one: await asyncio.to_thread(make_it)"
    require(is_free, WHERE, owned)
    config = EngineConfig(engine="vllm", **vllm_config.additional_config[SETTINGS]["config"])
    client: Any = OfflineClient(llm, is_owned=is_owned) if is_offline else BorrowedClient(llm)
    bridge = LoopThread()
    model_config = vllm_config.model_config
    max_logprobs, model_config.max_logprobs = model_config.max_logprobs, -1  # the proof asks for a whole row
    try:
        # Which weights it runs by now is its owner's to know.
        loaded = adopt(client, bridge, config, replace(resolve(config.model), version=None))
    except BaseException:
        client.shutdown()
        bridge.close()
        raise
    finally:
        model_config.max_logprobs = max_logprobs
    return loaded if worker is None else replace(loaded, load_module=partial(_module_of, ref(worker)))


def new_llm(config: EngineConfig) -> Any:
    """A `vllm.LLM` with what captures rows.

    Raises:
        ImportError: vLLM is missing.
        ModelError: the model cannot be had, or vLLM cannot run it.
        ParameterError: an option that vLLM refuses, or that this engine cannot serve.
    """
    from vllm import LLM

    check_settings(config)
    options = options_of(config)
    with telling_refusals(config.model):
        return LLM(**options)


def runs_here() -> bool:
    """Whether vLLM starts a `vllm.LLM` in this process: `VLLM_ENABLE_V1_MULTIPROCESSING=0`."""
    from vllm import envs

    return not envs.VLLM_ENABLE_V1_MULTIPROCESSING


def watchers(llm: Any) -> list[Any]:
    """Those of vLLM's processors in this process that change no greedy token; an empty list elsewhere."""
    processors = _along(llm, (*VLLM_WORKER, *VLLM_PROCESSORS))
    return [] if processors is None else processors.argmax_invariant


def _is_fitted_out(vllm_config: Any) -> bool:
    extra = vllm_config.additional_config
    return isinstance(extra, dict) and SETTINGS in extra


def _fit_out(worker: Any, vllm_config: Any) -> None:
    """Give a worker what `engine_args` has vLLM load: the settings, the processor, and one more method."""
    from logprobe.integrations.vllm.worker import LogprobeLogitsProcessor, RowsExtension

    model = vllm_config.model_config
    is_alone = vllm_config.speculative_config is None
    require(is_alone, WHERE, "speculates, which cannot stand beside the capture of rows")
    require(model.tokenizer == model.model, WHERE, "has another tokenizer than the model's own")
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
    """Return the module that a worker runs; None once its engine was freed."""
    alive = worker()
    return None if alive is None else alive.get_model()


def _along(start: Any, names: tuple[str, ...]) -> Any:
    """What lies at the end of a path of attributes; None where it leads nowhere."""
    for name in names:
        start = getattr(start, name, None)
    return start
