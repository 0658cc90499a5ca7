"""Loads a model and verifies it against transformers, which also runs it if no native decoder can."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from logprobe.engine.forward.cpu.native_decoder import native_decoder, vectors_of
from logprobe.engine.forward.ready import NUM_READS, panels_of, ready_model, stored_model
from logprobe.engine.forward.rope import follow_steps_
from logprobe.engine.forward.system_limits import check_memory
from logprobe.engine.forward.torch.transformers_decoder import TransformersDecoder
from logprobe.engine.forward.torch.transformers_linear import matrices_of, use_panels_
from logprobe.engine.forward.torch.transformers_proof import TransformersProof, described, refusing
from logprobe.kernels.layers.forms import arithmetic_of
from logprobe.models import load_model
from logprobe.models.folder import reading_errors
from logprobe.models.lazy import LazyModel
from logprobe.models.loading import load_lazily, load_state, num_weights
from logprobe.models.progress import CountedSource, LoadProgress
from logprobe.models.quiet import quiet_transformers
from logprobe.models.sources import weight_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logprobe.config import Weights
    from logprobe.engine.forward.ready import ReadyModel
    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models import ModelFiles
    from logprobe.models.loading import State
    from logprobe.models.stored.store import LoadStore

logger = logging.getLogger("logprobe")


def load_with_transformers(
    files: ModelFiles,
    dtype: str,
    device: str,
    state: State | None,
    store: LoadStore | None,
    why_plain: str | None,
    arithmetic: str,
    progress: LoadProgress,
) -> ReadyModel:
    """Load a model and verify it against transformers.

    Args:
        files: configuration, tokenizer and weights.
        dtype: dtype of hidden states and logits.
        device: `cpu`, `cuda` or `cuda:N`.
        state: weights to use instead of those in `files`, by parameter name.
        store: cached files of the model; None: nothing is stored.
        why_plain: why the native decoder and weight panels cannot be used; None if they can.
        arithmetic: of products with weight panels, `fma` or `bf16x3`.
        progress: progress bar.

    Raises:
        UnsupportedModelError: the model is not supported, or its logits differ from those of transformers.
    """
    with quiet_transformers():
        with reading_errors(files.name):
            model = _loaded(files, state, dtype=dtype, device=device, is_lazy=why_plain is None)
        if state is None and model.unread:
            model = replace(model, source=CountedSource(model.source, progress))
            progress.start(model.source, weight_bytes(files.folder), NUM_READS)

        def prove() -> ReadyModel:
            with torch.inference_mode():
                proof = TransformersProof(model)
                return _proven(files, model, proof, store, why_plain, arithmetic, progress)

        ready: ReadyModel = refusing(model.module, prove)
    return ready


def load_on_gpu(
    files: ModelFiles,
    device: str,
    dtype: str | None,
    weights: Weights,
    state: State | None,
    arithmetic: str,
    kv_dtype: str,
) -> ReadyModel | str:
    """Load a model for the GPU decoder, or return the reason why the GPU decoder cannot run it."""
    if weights == "plain":
        return "plain weights were requested"
    if dtype not in {None, "float32"}:
        return "the GPU decoder computes float32 logits, and another dtype was requested"
    with quiet_transformers():
        from logprobe.engine.forward.torch.cuda.build import cuda_decoder

        with reading_errors(files.name):
            model = load_lazily(files, state)
        if model is None:
            return "only transformers can read its weights"

        def prove() -> ReadyModel | str:
            with torch.inference_mode():
                proof = TransformersProof(model)
                decoder = cuda_decoder(
                    model,
                    proof,
                    device=device,
                    arithmetic="bf16x3" if arithmetic == "auto" else arithmetic,
                    kv_dtype=getattr(torch, kv_dtype),
                )
                if isinstance(decoder, str):
                    return decoder
                return ready_model(
                    decoder, decoder.kv_shapes, proof, decoder.hidden_size, arithmetic=decoder.arithmetic
                )

        made: ReadyModel | str = refusing(model.module, prove)
    return made


def _loaded(files: ModelFiles, state: State | None, *, dtype: str, device: str, is_lazy: bool) -> LazyModel:
    """Load the transformers model; with `is_lazy`, its matrices are read lazily if the files allow it."""
    kind: torch.dtype = getattr(torch, dtype)
    if is_lazy and (lazy := load_lazily(files, state)) is not None:
        return lazy
    if state is None:
        if device == "cpu":
            check_memory(files.name, num_weights(files) * kind.itemsize)
        return LazyModel.of(load_model(files, dtype=kind, device=device))
    return LazyModel.of(load_state(files, state, dtype=kind, device=device))


def _proven(
    files: ModelFiles,
    model: LazyModel,
    proof: TransformersProof,
    store: LoadStore | None,
    why_plain: str | None,
    arithmetic: str,
    progress: LoadProgress,
) -> ReadyModel:
    """Return the native decoder, verified against transformers, or else the verified transformers decoder.

    The latter is used if the native decoder does not support the model, or if its logits differ.
    """
    if why_plain is not None:
        return _transformers_decoder(model, proof, {}, why_plain)
    module = model.module
    spec = described(module, proof)
    progress.say("packing")
    matrices = matrices_of(module, with_experts=not isinstance(spec, str))
    panels = panels_of(matrices, model.source, store, arithmetic)
    progress.say("verifying")
    decoder = (
        spec
        if isinstance(spec, str)
        else native_decoder(spec, module.state_dict().keys(), vectors_of(module, spec), proof, panels)
    )
    if isinstance(decoder, str):
        logger.info("%s: using the transformers decoder: %s", files.name, decoder)
        return _transformers_decoder(model, proof, panels, decoder)
    return stored_model(decoder, proof, store)


def _transformers_decoder(
    model: LazyModel, proof: TransformersProof, panels: Mapping[str, PanelWeights], reason: str
) -> ReadyModel:
    module = model.module
    if proof.rope_boundary is not None:
        follow_steps_(module, proof.step, proof.rope_boundary)
    use_panels_(module, panels)
    model.materialise_()
    decoder = TransformersDecoder(module, proof.place, proof.step)
    pool = proof.prove(decoder)
    return ready_model(
        decoder,
        pool.shapes,
        proof,
        decoder.hidden_size,
        why_transformers=reason,
        arithmetic=arithmetic_of(panels.values()) if panels else "torch",
    )
