"""In which precision a server seems to compute: how far its numbers are from our own runs in several.

Each run is another model of the caller's kind, of the same files: in another dtype by transformers' modules,
or in float32 of weights that were rounded to GGUF's blocks.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.analysis.auditing.report import Distance
from logprobe.errors import ModelError, ParameterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import torch

    from logprobe.analysis.measures import Floats
    from logprobe.analysis.scorer import Scorer

PRECISIONS: Final = ("float32", "bfloat16", "float16", "q8_0", "q4_0")
BLOCKS: Final = ("q8_0", "q4_0")
BLOCK_SIZE: Final = 32  # weights of a row that share a scale


def distances(
    runs: Callable[[str], AbstractContextManager[Scorer]],
    samples: Sequence[tuple[tuple[int, ...], tuple[int, ...], Floats]],
) -> tuple[tuple[Distance, ...], dict[str, str]]:
    """How far numbers are from each precision's own, the nearest first, nats; and what could not be run, why.

    Args:
        runs: a model that computes in the precision of a name, for a `with` block.
        samples: contexts, the tokens after each, and the numbers that were reported of these, NaN where there
            is none.
    """
    found, refused = [], {}
    for precision in PRECISIONS:
        try:
            with runs(precision) as llm:
                scores = llm.score([(list(context), list(ids)) for context, ids, _ in samples])
        except ModelError as error:  # a model that does not run in it, by its proof
            refused[precision] = str(error)
            continue
        own = np.concatenate([np.asarray(score.token_logprobs, np.float64) for score in scores])
        errors = np.abs(own - np.concatenate([numbers for _, _, numbers in samples]))
        errors = errors[np.isfinite(errors)]
        found.append(Distance(precision=precision, mean=float(errors.mean()), worst=float(errors.max())))
    return tuple(sorted(found, key=lambda one: one.mean)), refused


def own_runs(llm: Any) -> Callable[[str], AbstractContextManager[Scorer]]:
    """Models of the same files as an `LLM`'s, by precision.

    Raises:
        ParameterError: one that was not loaded by a name, whose files are not known.
    """
    config = getattr(llm, "config", None)
    if config is None or llm.lora is not None:
        raise ParameterError(
            "precision", "needs an LLM that was loaded by a name or from a folder, without LoRA weights"
        )
    same = {"max_model_len": config.max_model_len, "kv_bytes": config.kv_bytes}

    @contextmanager
    def run(precision: str) -> Iterator[Scorer]:
        dtype = "float32" if precision in BLOCKS else precision
        weights = "auto" if dtype == "float32" else "plain"
        with type(llm)(config.model, dtype=dtype, weights=weights, **same) as other:
            if precision in BLOCKS:
                other.load_weights(rounded_weights(config.model, precision), version=precision)
            yield other

    return run


def rounded_weights(model: str, form: str) -> dict[str, torch.Tensor]:
    """A model's weights, every matrix rounded to blocks of GGUF's `q8_0` or `q4_0`; float32."""
    from logprobe.models import resolve
    from logprobe.models.loading import source_of

    source = source_of(resolve(model))
    if source is None:
        raise ParameterError("precision", f"{model}: its weights cannot be read tensor by tensor")
    return {name: rounded(source.read(name), form) for name in source.shapes}


def rounded(tensor: torch.Tensor, form: str) -> torch.Tensor:
    """One tensor as blocks give it back; what is no matrix, or has rows of odd lengths, stays."""
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    whole = tensor.to(torch.float32).contiguous()
    if whole.ndim < 2 or whole.shape[-1] % BLOCK_SIZE:
        return whole
    kind = GGMLQuantizationType[form.upper()]
    values = whole.numpy()
    return torch.from_numpy(
        np.ascontiguousarray(dequantize(quantize(values, kind), kind).reshape(values.shape))
    )
