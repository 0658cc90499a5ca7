"""A model from the record of its first load: modules of our own on mapped panels.

Nothing is converted or repacked, and transformers' modules are not even imported. What the record says was
proven with the same files, code, libraries and processor. That the mapped weights still give transformers'
own logits is proven again each time, on the tokens that the record keeps.
Before it: the cache. After it: the engine.
"""

from __future__ import annotations

import itertools
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from logprobe.engine.forward.attention import CurrentStep, every_way
from logprobe.engine.forward.decoder import Decoder, DecoderPlace
from logprobe.engine.forward.pool import KVPool
from logprobe.engine.protocol import Layout
from logprobe.engine.ready.model import ReadyModel
from logprobe.engine.ready.usual import DECODER, EMBEDDING, HEAD, Parts, UsualDecoder, UsualModel
from logprobe.kernels.attention.api import ScoreRule
from logprobe.models import load_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models import ModelFiles
    from logprobe.models.stored.record import LoadRecord

    Tensors = Mapping[str, torch.Tensor]

TOLERANCE = 1e-4  # of the largest logit, as at the first load

logger = logging.getLogger("logprobe")


def recall(
    files: ModelFiles, record: LoadRecord, tensors: Tensors, panels: Mapping[str, PanelWeights]
) -> ReadyModel | None:
    """The model of a record; None where it does not give the logits that the record keeps."""
    began = time.perf_counter()
    if record.is_tied:
        panels = {**panels, HEAD: panels[EMBEDDING]}
    rules = {layer: ScoreRule(rule.scale, rule.window) for layer, rule in enumerate(record.rules)}
    step = CurrentStep(windows={layer: rule.window for layer, rule in rules.items()}, rules=rules)
    parts = Parts(record, tensors, panels)
    decoder = UsualDecoder(record, tensors, parts, step)
    model = UsualModel(decoder, parts.linear(HEAD), partial(load_config, files)).eval()
    run = Decoder(model, DecoderPlace(DECODER, None), step)
    probe = _meets_references(run, model.lm_head, record, tensors)
    logger.debug("recalled in %.2f s", time.perf_counter() - began)
    if probe is None:
        return None
    head = panels[HEAD]
    return ReadyModel(
        model=model,
        decoder=run,
        head=model.lm_head,
        step=step,
        probe=probe,
        layout=Layout(
            weights="published",
            num_layers=record.num_layers,
            num_fused=record.num_layers,
            own_layers=(),
            rope_boundary=None,
            probe_difference=record.probe_difference,
        ),
        vocab_size=head.num_outputs,
        context_len=record.context_len,
        hidden_size=head.num_inputs,
        eos_token_ids=frozenset(record.eos_token_ids),
        is_recorded=record.is_recorded,
    )


@torch.inference_mode()
def _meets_references(decoder: Decoder, head: Any, record: LoadRecord, tensors: Tensors) -> KVPool | None:
    """Run the record's tokens by the ways that steps take; their pool, where they give its logits."""
    references = [_reference(tensors, number) for number in range(record.num_references)]
    lengths = [len(token_ids) for token_ids, _, _ in references]
    pool = KVPool(sum(lengths))
    prompts = list(torch.split(torch.arange(sum(lengths)), lengths))
    expected = torch.cat([logits for _, _, logits in references])
    _lay_out(pool, decoder)
    ways = [*every_way(pool, prompts)]
    # Whole prompts as they come last, which also fills the pool; then halves, row by row.
    for starts, plan in ([way for way in ways if not any(way[0])][-1], ways[-1]):
        pairs = list(zip(references, starts, strict=True))
        token_ids = torch.cat([ids[start:] for (ids, _, _), start in pairs])
        positions = torch.cat([places[start:] for (_, places, _), start in pairs])
        hidden = decoder(token_ids.numpy(), positions.numpy(), plan)
        ends = itertools.accumulate(len(ids) - start for (ids, _, _), start in pairs)
        kept = [torch.arange(end - len(one[2]), end) for end, one in zip(ends, references, strict=True)]
        difference = (head(hidden[torch.cat(kept)]) - expected).abs().max()
        if not difference <= TOLERANCE * expected.abs().max():
            return None
    return pool


def _lay_out(pool: KVPool, decoder: Decoder) -> None:
    """Let the pool know what each layer stores, so that the kernels that read it in place can."""
    for index, layer in enumerate(decoder.module.layers):
        attention: Any = layer.fused_attention
        dim = attention.key_dim
        key, value = (torch.empty(1, width // dim, dim) for width in attention.widths[1:])
        pool.layer(index, key, value)


def _reference(tensors: Tensors, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions, and the logits of the last ones."""
    name = f"reference.{number}"
    return tensors[f"{name}.ids"], tensors[f"{name}.positions"], tensors[f"{name}.logits"]
