"""From a configuration to a running native engine: weights, tokenizer, kernels, thread."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from logprobe.engine.backends.thread import ThreadEngine
from logprobe.engine.engine import Engine
from logprobe.engine.fold import Describer
from logprobe.engine.forward.native import NativeForward
from logprobe.engine.protocol import Capabilities
from logprobe.kernels import warm_up
from logprobe.kernels.threads.parallel import release_threads
from logprobe.models import Vocabulary, load_tokenizer, resolve
from logprobe.models.quiet import quiet_transformers
from logprobe.processors.registry import load_processors
from logprobe.records import LogprobsInfo
from logprobe.text.edge import TextEdge

if TYPE_CHECKING:
    from logprobe.config import EngineConfig
    from logprobe.engine.protocol import EngineBackend
    from logprobe.processors import Pipeline

logger = logging.getLogger("logprobe")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine and what the front doors need to speak its language."""

    engine: EngineBackend
    text: TextEdge
    model: Any = None  # the transformers module, where it lives in this process
    processors: Pipeline | None = None  # where they run in this process


def start_native_engine(config: EngineConfig) -> LoadedModel:
    """Load the model that `config` names and start its engine.

    Raises:
        ModelError: the model cannot be had or used.
        ParameterError: the settings do not fit the model.
    """
    load_processors(config.logits_processors)  # a wrong name is told before the weights are read
    files = resolve(config.model)
    with quiet_transformers():
        tokenizer = load_tokenizer(files)
    special = frozenset(tokenizer.all_special_ids)
    text = TextEdge(tokenizer, Vocabulary.from_tokenizer(tokenizer), special)
    _warm_up_kernels()
    with quiet_transformers():
        forward = NativeForward(config, files)
    dtype = str(forward.dtype).removeprefix("torch.")
    config = replace(config, device=forward.device, dtype=dtype)  # what processors are told
    engine = Engine(config, forward, text, _eos_token_ids(forward.model, tokenizer))
    capabilities = Capabilities(
        engine="native",
        model=files.name,
        device=forward.device,
        dtype=dtype,
        weights=forward.weights,
        vocab_size=forward.vocab_size,
        max_model_len=engine.max_len,
        num_slots=forward.num_slots,
        max_batch_tokens=config.max_batch_tokens,
        max_batch_rows=config.max_batch_rows,
        prompt_logprobs_with_prefix_cache=True,
        stages=("raw_logprobs", "processed_logprobs"),
        layout=forward.layout,
    )
    release_threads()  # from here on the engine's own thread computes
    source = LogprobsInfo(
        engine="native",
        model=config.model,
        logits_dtype=capabilities.dtype,
        weights=forward.layout.weights,
        layers=forward.layout.layers,
        probe_difference=forward.layout.probe_difference,
    )
    describer = Describer(source, forward.vocab_size, text.vocabulary)
    backend = ThreadEngine(engine, capabilities, describer)
    return LoadedModel(backend, text, forward.model, engine.processing.pipeline)


def _warm_up_kernels() -> None:
    done = warm_up()
    if not done.is_from_cache:
        logger.warning("compiled the CPU kernels in %.1f s; later starts read them from disk", done.seconds)


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a text, by the model's generation settings and by its tokenizer."""
    ids = {tokenizer.eos_token_id}
    for source in (model.generation_config, model.config):
        named = getattr(source, "eos_token_id", None)
        ids.update(named if isinstance(named, list) else [named])
    return frozenset(ids - {None})
