"""Linear layers in 8 bits, an opt-in that changes the numbers a little.

Weights have a scale for each output, activations one for each row. Before rounding, each input channel is
divided by a factor that moves large activations into the weights (SmoothQuant, Xiao et al. 2023), found on
a short text at load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from logprobe.engine.layers.packed import (
    SILU,
    GatedMLP,
    JoinedPart,
    as_packed_norm,
    children,
    is_gated_mlp,
    join,
)
from logprobe.errors import ParameterError
from logprobe.kernels.layers.int8 import gate, products, quantise_rows, scale_products
from logprobe.kernels.layers.int8_rows import Int8Weights, int8_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe.kernels.threads.parallel import Stage

CALIBRATION_TEXT = (
    "The ferry left at 7:45, three minutes late, with forty-two passengers and a crate of oranges. "
    'Nobody on board spoke; rain ran down the windows. "Is this the way to the museum?" a child asked. '
    "def area(radius): return 3.14159 * radius ** 2  # square metres\n"
    "In 1969 the committee published its report: costs had risen by 12.5 % a year, and most of the money "
    "had gone to roads. Le train arrive à midi. Water boils at 100 °C, but on the mountain it boils sooner."
)


# What lost the least on SmolLM2 (docs/decisions.md); a feed-forward part's last layer narrows.
SHARE_OF_INPUTS = 0.65
SHARE_WHERE_NARROWER = 0.5
TINY = 1e-5


class Int8Linear(nn.Module):
    """`nn.Linear` in 8 bits: about four times fewer bytes, and the products of 8-bit integers."""

    def __init__(self, linear: nn.Linear, largest_inputs: torch.Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach()
        inputs, outputs = largest_inputs.clamp_min(TINY), weight.abs().amax(dim=0).clamp_min(TINY)
        share = SHARE_OF_INPUTS if self.out_features >= self.in_features else SHARE_WHERE_NARROWER
        factors = inputs**share / outputs ** (1 - share)
        weight = weight * factors
        scales = (weight.abs().amax(dim=1) / 127).clamp_min(torch.finfo().tiny)
        values = (weight / scales[:, None]).round_().to(torch.int8)
        self.weights = Int8Weights(values, scales, 1 / factors, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) → (..., out_features)."""
        out = self._scaled(x.reshape(-1, self.in_features))
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, in_features) → (num_tokens, out_features / 2): the first half gates the second."""
        return self._scaled(x, is_gated=True) if self.bias is None else gate(self(x))

    def stages(
        self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> Iterator[Stage]:
        """The product of a few rows, plus `residual`, into `out`, ready to run."""
        yield int8_stage(x, self.weights, out, residual=residual)

    def _scaled(self, x: torch.Tensor, *, is_gated: bool = False) -> torch.Tensor:
        rows, scales = quantise_rows(x, self.weights.column_factors)
        found = products(rows, self.weights.values)
        return scale_products(found, scales, self.weights.scales, is_gated=is_gated)


class Int8GatedMLP(GatedMLP):
    """With silu; gate and up are joined into one product."""

    def __init__(self, mlp: Any, largest_inputs: torch.Tensor) -> None:
        super().__init__(mlp)
        self.gate_up_proj = Int8Linear(join([mlp.gate_proj, mlp.up_proj]), largest_inputs)
        self.gate_proj: Any = JoinedPart(mlp.gate_proj)
        self.up_proj: Any = JoinedPart(mlp.up_proj)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden size) → (..., feed-forward size)."""
        rows = x.reshape(-1, x.shape[-1])
        if type(self.gate_proj) is type(self.up_proj) is JoinedPart:
            inner = self.gate_up_proj.gated(rows)
        else:  # LoRA weights add to the halves before they meet
            halves = self.gate_up_proj(rows)
            gates, values = halves.chunk(2, dim=1)
            self.gate_proj.add_lora_(gates, rows)
            self.up_proj.add_lora_(values, rows)
            inner = gate(halves)
        return inner.view(*x.shape[:-1], -1)

    def inner_stages(self, x: torch.Tensor, out: torch.Tensor) -> Iterator[Stage]:
        """`inner` of a few rows into `out`, ready to run."""
        yield int8_stage(x, self.gate_up_proj.weights, out, is_gated=True)


def check_int8(model: nn.Module) -> None:
    """Raise `ParameterError` where a matrix of a decoder would stay as it is: 8 bits are not proven there."""
    kinds = {
        type(module).__name__
        for module in model.modules()
        for weight in module.parameters(recurse=False)
        if weight.dim() > 1 and not isinstance(module, nn.Embedding) and type(module) is not nn.Linear
    }
    if kinds:
        raise ParameterError(
            "weights", f"int8 is not proven for {', '.join(sorted(kinds))}; use packed or plain"
        )


def quantise_(model: nn.Module, run: Callable[[], Any]) -> None:
    """Replace the decoder's linear layers by their 8-bit form, calibrated on what `run` sends through.

    The output head stays in float32: a third of the loss came from there.
    """
    largest = _largest_inputs(model, run)
    for parent, name, module in list(children(model)):
        gate_proj: Any = getattr(module, "gate_proj", None)
        if is_gated_mlp(module, SILU) and gate_proj in largest:
            setattr(parent, name, Int8GatedMLP(module, largest[gate_proj]))
    for parent, name, module in list(children(model)):
        if module in largest:
            assert isinstance(module, nn.Linear)
            setattr(parent, name, Int8Linear(module, largest[module]))
        elif (norm := as_packed_norm(module)) is not None:
            setattr(parent, name, norm)


def _largest_inputs(model: nn.Module, run: Callable[[], Any]) -> dict[nn.Module, torch.Tensor]:
    """The largest magnitude of each input channel of each linear layer while `run` runs."""
    largest: dict[nn.Module, torch.Tensor] = {}

    def note(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        seen = inputs[0].detach().abs().flatten(0, -2).amax(dim=0)
        largest[module] = torch.maximum(largest[module], seen) if module in largest else seen

    linears = [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [module.register_forward_pre_hook(note) for module in linears]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return largest
