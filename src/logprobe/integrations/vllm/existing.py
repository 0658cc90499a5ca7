"""An engine of vLLM's that somebody else has started: what it is started with, and how it is taken in."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

from logprobe.config import EngineConfig
from logprobe.engine.backends.bridge import LoopThread
from logprobe.errors import require
from logprobe.integrations.vllm.offline import OfflineClient
from logprobe.integrations.vllm.orders import SETTINGS
from logprobe.integrations.vllm.start import adopt, engine_args
from logprobe.models import resolve

if TYPE_CHECKING:
    from logprobe.engine.backends.start import LoadedModel

WHERE = "llm_engine"


@final
class BorrowedClient:
    """An `AsyncLLM` that stays its owner's when `VllmEngine` has done."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def shutdown(self) -> None:
        """Nothing: it is its owner's to end."""


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


def existing_engine(llm: Any) -> LoadedModel:
    """Put a running `vllm.LLM` or `AsyncLLM` behind a `Front`; closing that leaves it to its owner.

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
    settings: Any = (vllm_config.additional_config or {}).get(SETTINGS)
    remedy = (
        "was made without what captures rows; make it as vllm.LLM(**AsyncVirtualLM.engine_options(model))"
    )
    require(settings is not None, WHERE, remedy)
    is_free = is_offline or llm.output_handler is None
    owned = "belongs to a running event loop; make it outside of one: await asyncio.to_thread(make_it)"
    require(is_free, WHERE, owned)
    config = EngineConfig(engine="vllm", **settings["config"])
    client: Any = OfflineClient(llm) if is_offline else BorrowedClient(llm)
    bridge = LoopThread()
    try:
        # Which weights it runs by now is its owner's to know.
        loaded = adopt(client, bridge, config, replace(resolve(config.model), version=None))
    except BaseException:
        client.shutdown()
        bridge.close()
        raise
    return (
        replace(loaded, load_module=partial(_module, client, bridge))
        if _is_here(vllm_config, llm)
        else loaded
    )


def _is_here(vllm_config: Any, llm: Any) -> bool:
    """Whether the one worker runs in this process."""
    from vllm import LLM, envs

    is_one = vllm_config.parallel_config.world_size == 1
    return isinstance(llm, LLM) and is_one and not envs.VLLM_ENABLE_V1_MULTIPROCESSING


def _module(client: OfflineClient, bridge: LoopThread) -> Any:
    return bridge.run(client.apply_model(_itself))[0]


def _itself(module: Any) -> Any:
    return module
