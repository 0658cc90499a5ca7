"""Builds the GPU decoder from a transformers model and verifies its logits."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from logprobe.engine.forward.cpu.native_decoder import module_frequencies
from logprobe.engine.forward.families import FAMILIES
from logprobe.engine.forward.torch.transformers_proof import described
from logprobe.errors import UnsupportedModelError
from logprobe.kernels.placement import as_tensor
from logprobe.models.sources import made_ahead

if TYPE_CHECKING:
    from logprobe.engine.forward.torch.cuda.decoder import CudaDecoder, Weight
    from logprobe.engine.forward.torch.transformers_proof import TransformersProof
    from logprobe.models.lazy import LazyModel
    from logprobe.models.sources import Source

BF16_TOLERANCE = 8e-2  # relative to the largest logit


def cuda_decoder(
    model: LazyModel,
    proof: TransformersProof,
    *,
    device: str,
    arithmetic: str = "bf16x3",
    kv_dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
) -> CudaDecoder | str:
    """Return the GPU decoder of a model, or the reason why the GPU decoder cannot run the model.

    Args:
        model: the transformers model.
        proof: verifies the decoder's logits.
        device: device of the decoder.
        arithmetic: `bf16x3` or `bf16`; see `EngineConfig`.
        kv_dtype: dtype of cached keys and values.
        tolerance: maximum difference of logits, relative to the largest logit; None: the default for the
            dtypes.
    """
    if find_spec("triton") is None:
        return "the GPU decoder needs Triton; install logprobe[cuda]"
    from logprobe.engine.forward.torch.cuda.decoder import CudaDecoder

    spec = described(model.module, proof)
    if isinstance(spec, str):
        return spec
    layers = f"{spec.path}.{FAMILIES[spec.family].layers}."
    tensors = parameters(model.source, model.module, device, quantised=layers)
    vectors = module_frequencies(model.module, spec)
    tensors |= {name: as_tensor(vector).to(device) for name, vector in vectors.items()}
    try:
        decoder = CudaDecoder(spec, tensors, device=device, arithmetic=arithmetic, kv_dtype=kv_dtype)
    except (KeyError, ValueError) as error:
        return f"its structure is not supported ({type(error).__name__}: {error})"
    if decoder.unplaced:
        return f"its tensor {decoder.unplaced[0]} is not supported"
    try:
        if tolerance is None and (arithmetic != "bf16x3" or kv_dtype != torch.float32):
            tolerance = BF16_TOLERANCE
        proof.prove(decoder, tolerance=tolerance)
    except UnsupportedModelError as error:
        return f"the GPU decoder did not pass verification ({error})"
    return decoder


def parameters(
    source: Source, module: Any, device: str, *, quantised: str | None = None
) -> dict[str, Weight]:
    """Return a module's parameters on a device, by name; a shared parameter appears once.

    Float parameters keep the checkpoint's dtype, except that float32 matrices are converted to the smallest
    dtype that represents them exactly. So are quantized matrices, unless their name starts with `quantised`.
    """
    names = [name for name, _ in module.named_parameters()]
    blocks = {name for name in names if quantised is not None and name.startswith(quantised)}
    read = (partial(_read, source, name, device, keeps_blocks=name in blocks) for name in names)
    return dict(zip(names, made_ahead(read), strict=True))


def _read(source: Source, name: str, device: str, *, keeps_blocks: bool) -> Weight:
    from logprobe.kernels.triton.blocks import from_panels
    from logprobe.kernels.triton.products import narrowed

    if keeps_blocks and (panels := source.panels(name)) is not None:
        blocks = from_panels(panels, device)
        if blocks is not None:
            return blocks
    tensor = as_tensor(source.read(name)).to(device, copy=True)  # copied, so that the file can be unmapped
    return narrowed(tensor) if tensor.dtype == torch.float32 and tensor.dim() > 1 else tensor
