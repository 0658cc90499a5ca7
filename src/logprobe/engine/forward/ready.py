"""Loads a model and verifies its logits against transformers, or without it against `reference`.

The first load runs the transformers model and the engine's decoder, compares their logits, and stores a
record. Where transformers is not installed, the decoder is compared with `reference` instead. Later loads
build the decoder from the record and run the record's reference tokens, which must give the stored logits.
Replacement weights are verified as in a first load.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from logprobe.engine.forward.config import LoadRecord
from logprobe.engine.forward.decoder import Decoder
from logprobe.engine.forward.proof import slots_of
from logprobe.engine.forward.system_limits import check_memory
from logprobe.engine.protocol import Layout
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
    from collections.abc import Mapping, Sequence

    from logprobe.config import Weights
    from logprobe.engine.forward.linear import Matrix
    from logprobe.engine.forward.proof import AnyDecoder, Proof
    from logprobe.kernels.arrays import Array
    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models import ModelFiles
    from logprobe.models.loading import State
    from logprobe.models.sources import Source

    Arrays = dict[str, Array]

TOLERANCE = 1e-4  # relative to the largest logit, as at the first load
NUM_READS = 3  # a first load reads all weights so many times: twice to verify, once to pack
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
    dtype: str  # of hidden states and logits
    kv_dtype: str
    is_recalled: bool = False  # loaded from the record of an earlier load


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
        device: `cpu`, `cuda` or `cuda:N`; a GPU is the current one of this thread.
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
            from logprobe.engine.forward.transformers_ready import load_on_gpu
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
    if store is not None and (recalled := _recalled(files, store)) is not None:
        return recalled
    if device == "cpu" and state is None:
        check_memory(files.name, weight_bytes(files.folder))
    with LoadProgress(files.name) as progress:
        if has_transformers():
            with quiet_imports():
                from logprobe.engine.forward.transformers_ready import load_with_transformers
            return load_with_transformers(files, dtype, device, state, store, why_plain, progress)
        if why_plain is not None:
            raise UnsupportedModelError(f"{files.name}: {why_plain}; {NEEDS_TRANSFORMERS}")
        return _proven_by_reference(files, state, store, progress)


def _why_plain(dtype: str, device: str) -> str | None:
    """Return why the native decoder and weight panels cannot be used here; None if they can."""
    if device != "cpu" or dtype != "float32":
        return "the native decoder needs float32 on a CPU"
    if native_library() is None:
        return "the native decoder needs the native kernels, which are not available"
    return None


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
        panels = panels_of(model.matrices(), model.source, store)
        progress.say("proving")
        decoder = native_decoder(model.spec, model.source.shapes.keys(), model.vectors(), proof, panels)
    if isinstance(decoder, str):
        raise UnsupportedModelError(f"{files.name}: {decoder}; {NEEDS_TRANSFORMERS}")
    return stored_model(decoder, proof, store)


def stored_model(decoder: Decoder, proof: Proof, store: LoadStore | None) -> ReadyModel:
    """Return a model whose native decoder is verified, and store a record for later loads."""
    ready = ready_model(decoder, decoder.kv_shapes, proof, decoder.hidden_size)
    if store is not None:
        record, tensors = _record(ready, proof)
        store.write_record(msgspec.json.encode(record).decode(), tensors)
    return ready


def panels_of(
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


def ready_model(
    decoder: AnyDecoder,
    kv_shapes: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]],
    proof: Proof,
    hidden_size: int,
    *,
    why_transformers: str | None = None,
    arithmetic: str = "fma",
) -> ReadyModel:
    """Return a model whose decoder is verified.

    Args:
        decoder: the decoder.
        kv_shapes: shapes of a slot's keys and values by layer.
        proof: has verified the decoder.
        hidden_size: width of the final hidden states.
        why_transformers: why the transformers decoder is used; None: another decoder is used.
        arithmetic: arithmetic of matrix products.
    """
    has_panels = arithmetic != "torch"
    kv_dtype = str(getattr(decoder, "kv_dtype", proof.dtype)).removeprefix("torch.")
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
            kv_dtype=kv_dtype,
        ),
        hidden_size=hidden_size,
        vocab_size=proof.vocab_size,
        context_len=proof.context_len,
        eos_token_ids=proof.eos_token_ids,
        dtype=proof.dtype,
        kv_dtype=kv_dtype,
    )


def _record(ready: ReadyModel, proof: Proof) -> tuple[LoadRecord, Arrays]:
    """Return the record for later loads, and the tensors that are stored with it."""
    decoder = ready.decoder
    assert isinstance(decoder, Decoder)
    tensors = dict(decoder.tensors)
    for number, reference in enumerate(proof.references):
        tensors[f"reference.{number}.ids"] = reference.token_ids
        tensors[f"reference.{number}.positions"] = reference.positions
        tensors[f"reference.{number}.logits"] = reference.logits[-KEPT_LOGITS:]
        tensors[f"reference.{number}.is_long"] = np.array([reference.is_long])
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
        dtype="float32",
        kv_dtype="float32",
        is_recalled=True,
    )


def _meets_references(decoder: Decoder, record: LoadRecord, tensors: Mapping[str, Array]) -> bool:
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


def _meets(decoder: Decoder, references: list[tuple[Array, Array, Array]], *, is_long: bool) -> bool:
    lengths = [len(token_ids) for token_ids, _, _ in references]
    pool = decoder.new_pool(sum(lengths))
    decoder.record_on(pool, max(lengths))
    prompts = slots_of(lengths)
    expected = np.concatenate([logits for _, _, logits in references])
    ways = [*decoder.all_plans(pool, prompts)]
    # The last plan that runs whole prompts, which also fills the cache; then the plan for second halves, row
    # by row.
    for starts, plan in ([way for way in ways if not any(way[0])][-1], ways[-1]):
        pairs = list(zip(references, starts, strict=True))
        token_ids = np.concatenate([ids[start:] for (ids, _, _), start in pairs])
        positions = np.concatenate([places[start:] for (_, places, _), start in pairs])
        hidden = decoder(token_ids, positions, plan, is_long=is_long)
        ends = itertools.accumulate(len(ids) - start for (ids, _, _), start in pairs)
        kept = [np.arange(end - len(one[2]), end) for end, one in zip(ends, references, strict=True)]
        logits = decoder.head(hidden[np.concatenate(kept)])
        if not np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max():
            return False
    return True


def _reference(tensors: Mapping[str, Array], number: int) -> tuple[Array, Array, Array]:
    """Return the token ids and positions of a reference, and the logits of its last tokens."""
    name = f"reference.{number}"
    return tensors[f"{name}.ids"], tensors[f"{name}.positions"], tensors[f"{name}.logits"]
