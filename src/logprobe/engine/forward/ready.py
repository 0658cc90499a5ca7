"""A loaded and verified model (`ReadyModel`), and the record from which later loads build it."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from logprobe.engine.forward.config import LoadRecord
from logprobe.engine.forward.cpu.decoder import Decoder
from logprobe.engine.forward.proof import slots_of
from logprobe.engine.protocol import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logprobe.engine.forward.cpu.linear import Matrix
    from logprobe.engine.forward.proof import AnyDecoder, Proof
    from logprobe.kernels.arrays import Array
    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models import ModelFiles
    from logprobe.models.sources import Source
    from logprobe.models.stored.store import LoadStore

    Arrays = dict[str, Array]

TOLERANCE = 1e-4  # relative to the largest logit, as at the first load
NUM_READS = 3  # how often a first load reads all weights: twice to verify, once to pack
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


def stored_model(decoder: Decoder, proof: Proof, store: LoadStore | None) -> ReadyModel:
    """Return the model of a verified native decoder; if `store` is given, store a record for later loads."""
    ready = ready_model(decoder, decoder.kv_shapes, proof, decoder.hidden_size, arithmetic=decoder.arithmetic)
    if store is not None:
        record, tensors = _record(ready, proof)
        store.write_record(msgspec.json.encode(record).decode(), tensors)
    return ready


def panels_of(
    matrices: Sequence[Matrix], source: Source, store: LoadStore | None, arithmetic: str
) -> Mapping[str, PanelWeights]:
    """Return the panels of matrices by name: read from `store`, or packed now and stored if possible.

    Args:
        matrices: the matrices.
        source: where weights are read from.
        store: cached files of the model.
        arithmetic: of products with the panels, `fma` or `bf16x3`.
    """
    from logprobe.engine.forward.cpu.linear import in_huge_pages, packed

    if store is not None:
        stored = store.panels()
        if all(any(name in stored for name in matrix.names) for matrix in matrices):
            return _for_products(arithmetic, stored)
        parts = [matrix.names for matrix in matrices]
        if stored := store.write_panels(parts, lambda start: packed(matrices[start:], source)):
            return _for_products(arithmetic, stored)
    made = zip(matrices, in_huge_pages(packed(matrices, source)), strict=True)
    return _for_products(arithmetic, {name: panels for matrix, panels in made for name in matrix.names})


def _for_products(arithmetic: str, panels: Mapping[str, PanelWeights]) -> Mapping[str, PanelWeights]:
    return {name: one.multiplied_by(arithmetic) for name, one in panels.items()}


def ready_model(
    decoder: AnyDecoder,
    kv_shapes: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]],
    proof: Proof,
    hidden_size: int,
    *,
    why_transformers: str | None = None,
    arithmetic: str = "fma",
) -> ReadyModel:
    """Return the model of a verified decoder.

    Args:
        decoder: the decoder.
        kv_shapes: shapes of a slot's keys and values by layer.
        proof: the proof that has verified the decoder.
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


def recalled(files: ModelFiles, store: LoadStore, arithmetic: str) -> ReadyModel | None:
    """Load the model from the record of an earlier load; None if there is no record or logits differ.

    The record holds for any `arithmetic` of products with weights.
    """
    stored = store.record()
    if stored is None:
        return None
    text, tensors = stored
    # The comparison of logits detects damage.
    panels = _for_products(arithmetic, store.panels(is_checked=False))
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
            arithmetic=decoder.arithmetic,
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
