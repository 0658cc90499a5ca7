"""Loads a model and verifies its logits against transformers, or without it against `reference`.

The first load runs the transformers model and the engine's decoder, compares their logits, and stores a
record. Where transformers is not installed, the decoder is compared with `reference` instead. Later loads
build the decoder from the record and run the record's reference tokens, which must give the stored logits.
Replacement weights are verified as in a first load.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec
import torch

from logprobe.engine.forward.config import LoadRecord
from logprobe.engine.forward.decoder import Decoder
from logprobe.engine.forward.system_limits import check_memory
from logprobe.engine.protocol import Layout
from logprobe.errors import ModelNotFoundError, ParameterError, UnsupportedModelError, require
from logprobe.kernels.info import REMEDY, native_library
from logprobe.models import load_model
from logprobe.models.config_files import read_config, read_generation_config
from logprobe.models.folder import reading_errors
from logprobe.models.loading import load_lazily, load_state, num_weights, source_of
from logprobe.models.progress import CountedSource, LoadProgress
from logprobe.models.quiet import quiet_transformers
from logprobe.models.sources import StateSource, weight_bytes
from logprobe.models.stored.store import LoadStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logprobe.config import Weights
    from logprobe.engine.forward.linear import Matrix
    from logprobe.engine.forward.proof import AnyDecoder, Proof
    from logprobe.engine.forward.transformers_proof import TransformersProof
    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models import ModelFiles
    from logprobe.models.lazy import LazyModel
    from logprobe.models.loading import State
    from logprobe.models.sources import Source

    Tensors = dict[str, torch.Tensor]

TOLERANCE = 1e-4  # relative to the largest logit, as at the first load
NUM_READS = 3  # a first load reads all weights so many times: twice to verify, once to pack
NEEDS_TRANSFORMERS = "transformers may be able to run it: pip install transformers"
KEPT_LOGITS = 2  # logits are stored for the last tokens of each reference, which attend to all others

logger = logging.getLogger("logprobe")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyModel:
    """A loaded and verified model."""

    decoder: AnyDecoder
    kv_shapes: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]  # by layer
    layout: Layout
    hidden_size: int
    vocab_size: int
    context_len: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype  # dtype of hidden states and logits
    kv_dtype: torch.dtype
    is_recalled: bool = False  # loaded from the record of an earlier load


def make_ready(
    files: ModelFiles,
    *,
    dtype: torch.dtype | None,
    device: str,
    weights: Weights,
    state: State | None = None,
    arithmetic: str = "auto",
    kv_dtype: torch.dtype = torch.float32,
) -> ReadyModel:
    """Load a model and verify its logits.

    Args:
        files: configuration, tokenizer and weights.
        dtype: dtype of hidden states and logits; None: float32, or bfloat16 for the transformers decoder on a
            GPU.
        device: `cpu` or `cuda`.
        weights: `auto`, `checkpoint` or `plain`.
        state: weights to use instead of those in `files`, by parameter name; nothing is stored for later
            loads.
        arithmetic: arithmetic of matrix products; see `EngineConfig`.
        kv_dtype: dtype of cached keys and values on a GPU.

    Raises:
        UnsupportedModelError: the model is not supported, or its logits differ from the reference's.
        ParameterError: `weights`, `arithmetic` or `kv_dtype` is not available for this device or dtype.
    """
    why_plain = _why_plain(dtype or torch.float32, device)
    if device == "cuda":
        made = _on_gpu(files, dtype, weights, state, arithmetic, kv_dtype)
        if isinstance(made, ReadyModel):
            return made
        why_plain = made
        remedy = f"the GPU decoder does not support this model: {made}; leave it out"
        require(arithmetic == "auto", "arithmetic", f"{arithmetic} is not available: {remedy}")
        require(kv_dtype == torch.float32, "kv_dtype", f"{kv_dtype} is not available: {remedy}")
        dtype = dtype or torch.bfloat16
        logger.warning("%s: using the transformers decoder in %s: %s", files.name, dtype, made)
    dtype = dtype or torch.float32
    if weights == "checkpoint" and why_plain is not None:
        remedy = "use auto or plain" + (f", or {REMEDY}" if native_library() is None else "")
        raise ParameterError("weights", f"checkpoint is not available: {why_plain}; {remedy}")
    if weights == "plain":
        why_plain = "plain weights were requested"
    store = LoadStore.of(files) if why_plain is None and state is None else None
    if store is not None and (recalled := _recalled(files, store)) is not None:
        return recalled
    if device == "cpu" and state is None:
        check_memory(files.name, weight_bytes(files.folder))
    if not has_transformers():
        if why_plain is not None:
            raise UnsupportedModelError(f"{files.name}: {why_plain}; {NEEDS_TRANSFORMERS}")
        with LoadProgress(files.name) as progress:
            return _proven_by_reference(files, state, store, progress)
    with quiet_transformers(), LoadProgress(files.name) as progress:
        from logprobe.engine.forward.transformers_proof import TransformersProof, refusing

        with reading_errors(files.name):
            model = _loaded(files, state, dtype=dtype, device=device, is_lazy=why_plain is None)
        if state is None and model.unread:
            model = replace(model, source=CountedSource(model.source, progress))
            progress.start(model.source, weight_bytes(files.folder), NUM_READS)

        def prove() -> ReadyModel:
            with torch.inference_mode():
                proof = TransformersProof(model)
                return _proven(files, model, proof, store, why_plain, progress)

        ready: ReadyModel = refusing(model.module, prove)
    return ready


def has_transformers() -> bool:
    """Return True if transformers is installed; models are then verified against it."""
    return find_spec("transformers") is not None


def _on_gpu(
    files: ModelFiles,
    dtype: torch.dtype | None,
    weights: Weights,
    state: State | None,
    arithmetic: str,
    kv_dtype: torch.dtype,
) -> ReadyModel | str:
    """Load a model for the GPU decoder, or return the reason why the GPU decoder cannot run it."""
    if weights == "plain":
        return "plain weights were requested"
    if dtype not in {None, torch.float32}:
        return "the GPU decoder computes float32 logits, and another dtype was requested"
    with quiet_transformers():
        from logprobe.engine.forward.cuda.build import cuda_decoder
        from logprobe.engine.forward.transformers_proof import TransformersProof, refusing

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
                    device="cuda",
                    arithmetic="bf16x3" if arithmetic == "auto" else arithmetic,
                    kv_dtype=kv_dtype,
                )
                if isinstance(decoder, str):
                    return decoder
                return _ready(
                    decoder, decoder.kv_shapes, proof, decoder.hidden_size, arithmetic=decoder.arithmetic
                )

        made: ReadyModel | str = refusing(model.module, prove)
    return made


def _why_plain(dtype: torch.dtype, device: str) -> str | None:
    """Return why the native decoder and weight panels cannot be used here; None if they can."""
    if device != "cpu" or dtype != torch.float32:
        return "the native decoder needs float32 on a CPU"
    if native_library() is None:
        return "the native decoder needs the native kernels, which are not available"
    return None


def _loaded(
    files: ModelFiles, state: State | None, *, dtype: torch.dtype, device: str, is_lazy: bool
) -> LazyModel:
    """Load the transformers model; with `is_lazy`, its matrices are read lazily if the files allow it."""
    from logprobe.models.lazy import LazyModel

    if is_lazy and (lazy := load_lazily(files, state)) is not None:
        return lazy
    if state is None:
        if device == "cpu":
            check_memory(files.name, num_weights(files) * dtype.itemsize)
        return LazyModel.of(load_model(files, dtype=dtype, device=device))
    return LazyModel.of(load_state(files, state, dtype=dtype, device=device))


def _proven(
    files: ModelFiles,
    model: LazyModel,
    proof: TransformersProof,
    store: LoadStore | None,
    why_plain: str | None,
    progress: LoadProgress,
) -> ReadyModel:
    """Verify the native decoder against transformers, or the transformers decoder if it cannot be used."""
    from logprobe.engine.forward.native_decoder import native_decoder, vectors_of
    from logprobe.engine.forward.transformers_linear import matrices_of
    from logprobe.engine.forward.transformers_proof import described

    if why_plain is not None:
        return _transformers_decoder(model, proof, {}, why_plain)
    module = model.module
    spec = described(module, proof)
    progress.say("packing")
    matrices = matrices_of(module, with_experts=not isinstance(spec, str))
    panels = _panels(matrices, model.source, store)
    progress.say("proving")
    decoder = (
        spec
        if isinstance(spec, str)
        else native_decoder(spec, module.state_dict().keys(), vectors_of(module, spec), proof, panels)
    )
    if isinstance(decoder, str):
        logger.info("%s: using the transformers decoder: %s", files.name, decoder)
        return _transformers_decoder(model, proof, panels, decoder)
    return _stored(decoder, proof, store)


@torch.inference_mode()
def _proven_by_reference(
    files: ModelFiles, state: State | None, store: LoadStore | None, progress: LoadProgress
) -> ReadyModel:
    """Verify the native decoder against `reference`.

    Raises:
        UnsupportedModelError: the native decoder does not support the model, or its logits differ.
    """
    from logprobe.engine.forward.native_decoder import native_decoder
    from logprobe.engine.forward.reference_proof import PlainModel, ReferenceProof

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
        panels = _panels(model.matrices(), model.source, store)
        progress.say("proving")
        decoder = native_decoder(model.spec, model.source.shapes.keys(), model.vectors(), proof, panels)
    if isinstance(decoder, str):
        raise UnsupportedModelError(f"{files.name}: {decoder}; {NEEDS_TRANSFORMERS}")
    return _stored(decoder, proof, store)


def _stored(decoder: Decoder, proof: Proof, store: LoadStore | None) -> ReadyModel:
    """Return a model whose native decoder is verified, and store a record for later loads."""
    ready = _ready(decoder, decoder.kv_shapes, proof, decoder.hidden_size)
    if store is not None:
        record, tensors = _record(ready, proof)
        store.write_record(msgspec.json.encode(record).decode(), tensors)
    return ready


def _panels(
    matrices: Sequence[Matrix], source: Source, store: LoadStore | None
) -> Mapping[str, PanelWeights]:
    """Return the panels of matrices by name: the stored ones, or packed now and stored if possible."""
    from logprobe.engine.forward.linear import in_huge_pages, packed

    if store is not None:
        stored = store.panels()
        if all(any(name in stored for name in matrix.names) for matrix in matrices):
            return stored
        parts = [matrix.names for matrix in matrices]
        if stored := store.write_panels(parts, lambda start: packed(matrices[start:], source)):
            return stored
    made = zip(matrices, in_huge_pages(packed(matrices, source)), strict=True)
    return {name: panels for matrix, panels in made for name in matrix.names}


def _transformers_decoder(
    model: LazyModel, proof: TransformersProof, panels: Mapping[str, PanelWeights], reason: str
) -> ReadyModel:
    from logprobe.engine.forward.rope import follow_steps_
    from logprobe.engine.forward.transformers_decoder import TransformersDecoder
    from logprobe.engine.forward.transformers_linear import use_panels_

    module = model.module
    if proof.rope_boundary is not None:
        follow_steps_(module, proof.step, proof.rope_boundary)
    use_panels_(module, panels)
    model.materialise_()
    decoder = TransformersDecoder(module, proof.place, proof.step)
    pool = proof.prove(decoder)
    return _ready(
        decoder,
        pool.shapes,
        proof,
        decoder.hidden_size,
        why_transformers=reason,
        arithmetic="fma" if panels else "torch",
    )


def _ready(
    decoder: AnyDecoder,
    kv_shapes: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]],
    proof: Proof,
    hidden_size: int,
    *,
    why_transformers: str | None = None,
    arithmetic: str = "fma",
) -> ReadyModel:
    has_panels = arithmetic != "torch"
    kv_dtype: torch.dtype = getattr(decoder, "kv_dtype", proof.dtype)
    return ReadyModel(
        decoder=decoder,
        kv_shapes=kv_shapes,
        layout=Layout(
            weights="checkpoint" if has_panels else "plain",
            arithmetic=arithmetic,
            num_layers=len(kv_shapes),
            why_transformers=why_transformers,
            rope_boundary=proof.rope_boundary,
            probe_difference=proof.largest_difference,
            verified_against=proof.verified_against,
            kv_dtype=str(kv_dtype).removeprefix("torch."),
        ),
        hidden_size=hidden_size,
        vocab_size=proof.vocab_size,
        context_len=proof.context_len,
        eos_token_ids=proof.eos_token_ids,
        dtype=proof.dtype,
        kv_dtype=kv_dtype,
    )


def _record(ready: ReadyModel, proof: Proof) -> tuple[LoadRecord, Tensors]:
    """Return the record for later loads, and the tensors that are stored with it."""
    decoder = ready.decoder
    assert isinstance(decoder, Decoder)
    tensors = {name: torch.from_numpy(array) for name, array in decoder.tensors.items()}
    for number, reference in enumerate(proof.references):
        tensors[f"reference.{number}.ids"] = torch.from_numpy(reference.token_ids)
        tensors[f"reference.{number}.positions"] = torch.from_numpy(reference.positions)
        tensors[f"reference.{number}.logits"] = reference.logits[-KEPT_LOGITS:]
        tensors[f"reference.{number}.is_long"] = torch.tensor([reference.is_long])
    record = LoadRecord(
        decoder=decoder.spec,
        context_len=ready.context_len,
        eos_token_ids=sorted(ready.eos_token_ids),
        probe_difference=ready.layout.probe_difference,
        verified_against=proof.verified_against,
        num_references=len(proof.references),
    )
    return record, tensors


def _recalled(files: ModelFiles, store: LoadStore) -> ReadyModel | None:
    """Load the model from an earlier load's record; None if there is none or the logits differ."""
    stored = store.record()
    if stored is None:
        return None
    text, tensors = stored
    panels = store.panels(is_checked=False)  # the comparison of logits detects damage
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("reference.")}
    try:
        record = msgspec.json.decode(text, type=LoadRecord)
        decoder = Decoder(record.decoder, weights, panels)
        meets_references = _meets_references(decoder, record, tensors)
    # A damaged file may lack tensors or have other shapes.
    except (KeyError, ValueError, RuntimeError, IndexError) as error:
        logger.warning("%s: cannot use the stored load record (%s); verifying again", files.name, error)
        return None
    if not meets_references:
        logger.warning("%s: the stored weights give other logits; verifying again", files.name)
        return None
    return ReadyModel(
        decoder=decoder,
        kv_shapes=decoder.kv_shapes,
        layout=Layout(
            weights="checkpoint",
            arithmetic="fma",
            num_layers=len(decoder.layers),
            why_transformers=None,
            rope_boundary=record.decoder.rope_boundary,
            probe_difference=record.probe_difference,
            verified_against=record.verified_against,
        ),
        hidden_size=decoder.hidden_size,
        vocab_size=decoder.vocab_size,
        context_len=record.context_len,
        eos_token_ids=frozenset(record.eos_token_ids),
        dtype=torch.float32,
        kv_dtype=torch.float32,
        is_recalled=True,
    )


@torch.inference_mode()
def _meets_references(decoder: Decoder, record: LoadRecord, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return True if the record's reference tokens give the stored logits.

    They run as whole prompts and, with half of each prompt cached, row by row.
    """
    for is_long in (False, True):
        numbers = [
            number
            for number in range(record.num_references)
            if bool(tensors[f"reference.{number}.is_long"]) == is_long
        ]
        if numbers and not _meets(
            decoder, [_reference(tensors, number) for number in numbers], is_long=is_long
        ):
            return False
    return True


def _meets(
    decoder: Decoder, references: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], *, is_long: bool
) -> bool:
    lengths = [len(token_ids) for token_ids, _, _ in references]
    pool = decoder.new_pool(sum(lengths))
    decoder.record_on(pool, max(lengths))
    prompts = list(torch.split(torch.arange(sum(lengths)), lengths))
    expected = torch.cat([logits for _, _, logits in references])
    ways = [*decoder.all_plans(pool, prompts)]
    # The last plan that runs whole prompts, which also fills the cache; then the plan for second halves, row
    # by row.
    for starts, plan in ([way for way in ways if not any(way[0])][-1], ways[-1]):
        pairs = list(zip(references, starts, strict=True))
        token_ids = torch.cat([ids[start:] for (ids, _, _), start in pairs])
        positions = torch.cat([places[start:] for (_, places, _), start in pairs])
        hidden = decoder(token_ids.numpy(), positions.numpy(), plan, is_long=is_long)
        ends = itertools.accumulate(len(ids) - start for (ids, _, _), start in pairs)
        kept = [torch.arange(end - len(one[2]), end) for end, one in zip(ends, references, strict=True)]
        logits = torch.from_numpy(decoder.head(hidden[torch.cat(kept).numpy()]))
        difference = (logits - expected).abs().max()
        if not difference <= TOLERANCE * expected.abs().max():
            return False
    return True


def _reference(
    tensors: Mapping[str, torch.Tensor], number: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the token ids and positions of a reference, and the logits of its last tokens."""
    name = f"reference.{number}"
    return tensors[f"{name}.ids"], tensors[f"{name}.positions"], tensors[f"{name}.logits"]
