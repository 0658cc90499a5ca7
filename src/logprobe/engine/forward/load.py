"""Loads a model and verifies its logits against transformers, or `reference` if transformers is missing.

The first load runs the transformers model and the engine's decoder, compares their logits, and stores a
record. Where transformers is not installed, the decoder is compared with `reference` instead. Later loads
build the decoder from the record and run the record's reference tokens, which must give the stored logits.
Replacement weights are verified as in a first load.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from logprobe.engine.forward.cpu.native_decoder import native_decoder
from logprobe.engine.forward.ready import NUM_READS, ReadyModel, panels_of, recalled, stored_model
from logprobe.engine.forward.reference_proof import PlainModel, ReferenceProof
from logprobe.engine.forward.system_limits import check_memory
from logprobe.errors import ModelNotFoundError, ParameterError, UnsupportedModelError, require
from logprobe.kernels.info import REMEDY, native_library
from logprobe.models.config_files import read_config, read_generation_config
from logprobe.models.folder import reading_errors
from logprobe.models.loading import NEEDS_TRANSFORMERS, has_transformers, source_of
from logprobe.models.progress import CountedSource, LoadProgress
from logprobe.models.quiet import quiet_imports
from logprobe.models.sources import StateSource, weight_bytes
from logprobe.models.stored.store import LoadStore

if TYPE_CHECKING:
    from logprobe.config import Weights
    from logprobe.models import ModelFiles
    from logprobe.models.loading import State

logger = logging.getLogger("logprobe")


def make_ready(
    files: ModelFiles,
    *,
    dtype: str | None,
    device: str,
    weights: Weights,
    state: State | None = None,
    arithmetic: str = "auto",
    kv_dtype: str = "float32",
) -> ReadyModel:
    """Load a model and verify its logits.

    Args:
        files: configuration, tokenizer and weights.
        dtype: dtype of hidden states and logits; None: float32, or bfloat16 for the transformers decoder on a
            GPU.
        device: `cpu`, `cuda` or `cuda:N`; a GPU must be this thread's current device.
        weights: `auto`, `checkpoint` or `plain`.
        state: weights to use instead of those in `files`, by parameter name; nothing is stored for later
            loads.
        arithmetic: arithmetic of matrix products; see `EngineConfig`.
        kv_dtype: dtype of cached keys and values on a GPU.

    Raises:
        UnsupportedModelError: the model is not supported, or its logits differ from the reference's.
        ParameterError: `weights`, `arithmetic` or `kv_cache_dtype` is not available for this device or dtype.
    """
    why_plain = _why_plain(dtype or "float32", device)
    if device != "cpu":
        with quiet_imports():
            from logprobe.engine.forward.torch.transformers_ready import load_on_gpu
        made = load_on_gpu(files, device, dtype, weights, state, arithmetic, kv_dtype)
        if isinstance(made, ReadyModel):
            return made
        why_plain = made
        remedy = f"the GPU decoder does not support this model: {made}; leave it out"
        require(arithmetic == "auto", "arithmetic", f"{arithmetic} is not available: {remedy}")
        require(kv_dtype == "float32", "kv_cache_dtype", f"{kv_dtype} is not available: {remedy}")
        dtype = dtype or "bfloat16"
        logger.warning("%s: using the transformers decoder in %s: %s", files.name, dtype, made)
    dtype = dtype or "float32"
    if weights == "checkpoint" and why_plain is not None:
        remedy = "use auto or plain" + (f", or {REMEDY}" if native_library() is None else "")
        raise ParameterError("weights", f"checkpoint is not available: {why_plain}; {remedy}")
    if weights == "plain":
        why_plain = "plain weights were requested"
    store = LoadStore.of(files) if why_plain is None and state is None else None
    if arithmetic == "auto":
        arithmetic = "fma"
    elif arithmetic != "fma" and why_plain is not None:
        raise ParameterError("arithmetic", f"{arithmetic} is not available: {why_plain}; leave it out")
    if store is not None and (ready := recalled(files, store, arithmetic)) is not None:
        return ready
    if device == "cpu" and state is None:
        check_memory(files.name, weight_bytes(files.folder))
    with LoadProgress(files.name) as progress:
        if has_transformers():
            with quiet_imports():
                from logprobe.engine.forward.torch.transformers_ready import load_with_transformers
            return load_with_transformers(files, dtype, device, state, store, why_plain, arithmetic, progress)
        if why_plain is not None:
            raise UnsupportedModelError(f"{files.name}: {why_plain}; {NEEDS_TRANSFORMERS}")
        return _proven_by_reference(files, state, store, arithmetic, progress)


def _why_plain(dtype: str, device: str) -> str | None:
    """Return why the native decoder and weight panels cannot be used here; None if they can."""
    if device != "cpu" or dtype != "float32":
        return "the native decoder needs float32 on a CPU"
    if native_library() is None:
        return "the native decoder needs the native kernels, which are not available"
    return None


def _proven_by_reference(
    files: ModelFiles, state: State | None, store: LoadStore | None, arithmetic: str, progress: LoadProgress
) -> ReadyModel:
    """Load a model with the native decoder, verified against `engine.forward.reference`.

    Raises:
        UnsupportedModelError: the native decoder does not support the model, or its logits differ.
    """
    try:
        config = read_config(files.folder)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}; {NEEDS_TRANSFORMERS}") from error
    source = source_of(files) if state is None else StateSource(state)
    if source is None:
        raise ModelNotFoundError(f"{files.folder}: has no weights (*.safetensors); fetch the whole model")
    if state is None:
        source = CountedSource(source, progress)
        progress.start(source, weight_bytes(files.folder), NUM_READS)
    with reading_errors(files.name):
        model = PlainModel.of(config, source)
        if isinstance(model, str):
            raise UnsupportedModelError(f"{files.name}: {model}; {NEEDS_TRANSFORMERS}")
        ids = config.eos_token_ids | read_generation_config(files.folder).eos_token_ids
        proof = ReferenceProof(model, eos_token_ids=ids)
        progress.say("packing")
        panels = panels_of(model.matrices(), model.source, store, arithmetic)
        progress.say("verifying")
        decoder = native_decoder(model.spec, model.source.shapes.keys(), model.vectors(), proof, panels)
    if isinstance(decoder, str):
        raise UnsupportedModelError(f"{files.name}: {decoder}; {NEEDS_TRANSFORMERS}")
    return stored_model(decoder, proof, store)
