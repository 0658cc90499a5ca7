"""Linear layers in the layout that the CPU's matrix product wants, and the modules that use them.

oneDNN can take a weight reordered once; its products are then two to three times as fast as on the plain
layout. The reordered weight takes the plain one's place, so memory stays the same (a head tied to the
embedding excepted, which needs both). Whatever is swapped here is proven by the probe at load.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import torch
from torch import nn

from logprobe.engine.layers import forms
from logprobe.engine.layers.source import form_of, has_form, mentions, parts_of
from logprobe.errors import ParameterError
from logprobe.kernels import hooks
from logprobe.kernels.layers.norm import rms_norm
from logprobe.kernels.layers.widen import can_widen
from logprobe.kernels.shapes import num_filled, with_zeros

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from transformers.pytorch_utils import Conv1D

    from logprobe.config import Weights
    from logprobe.engine.layers.forms import PlainMLPForm


class JoinedPart(nn.Module):
    """The place of a projection that was joined with others; LoRA weights may take it."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def add_lora_(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Leave the joined product as it is."""


def join(linears: Sequence[Any]) -> Any:
    """One layer whose outputs are those of several, one after another."""
    if type(linears[0]) is not nn.Linear:
        return linears[0].joined(linears[1:])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    num_outputs = sum(linear.out_features for linear in linears)
    joined = nn.Linear(linears[0].in_features, num_outputs, bias=False, device="meta")
    joined.weight = nn.Parameter(
        torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False
    )
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined


PACK_ROWS = 32  # the number of rows that oneDNN is told to expect; any other number runs as well
# transformers' activation class -> oneDNN's name and algorithm for it
_ACTIVATIONS: Final = {
    "SiLUActivation": ("swish", ""),
    "SiLU": ("swish", ""),
    "GELUTanh": ("gelu", "tanh"),
    "NewGELUActivation": ("gelu", "tanh"),
    "GELUActivation": ("gelu", "none"),
}
SILU = {"SiLUActivation", "SiLU"}  # transformers' and torch's classes
_product, _reorder = hooks.LINEAR.find(), hooks.REORDER.find()


class PackedLinear(nn.Module):
    """`nn.Linear`, or GPT-2's `Conv1D`, on a weight that oneDNN has reordered."""

    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        super().__init__()
        weight = weight_of(linear).detach().contiguous()
        self.out_features, self.in_features = weight.shape
        self.bias = linear.bias
        self._weight = _reorder(weight, PACK_ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) → (..., out_features)."""
        return self.activated(x, "none", "")

    def activated(self, x: torch.Tensor, name: str, algorithm: str) -> torch.Tensor:
        """The product followed by an activation, in one pass over the result."""
        rows = x.reshape(-1, self.in_features)
        filled = with_zeros(rows, num_filled(len(rows)) - len(rows))
        out: torch.Tensor = _product(filled, self._weight, self.bias, name, [], algorithm)
        return out[: len(rows)].view(*x.shape[:-1], self.out_features)

    def multiplied(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The product times `factor`, element by element, in one pass over the result."""
        return self._with(x, factor, "mul")

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus `residual`, likewise."""
        return self._with(x, residual, "add")

    def _with(self, x: torch.Tensor, other: torch.Tensor, operation: str) -> torch.Tensor:
        rows, others = x.reshape(-1, self.in_features), other.view(-1, self.out_features)
        more = num_filled(len(rows)) - len(rows)
        filled, others = with_zeros(rows, more), with_zeros(others, more)
        out: torch.Tensor = _product.binary(filled, others, self._weight, self.bias, operation)
        return out[: len(rows)].view(*x.shape[:-1], self.out_features)


class GatedMLP(nn.Module, ABC):
    """`down(act(gate(x)) * up(x))`; what is before the last product is the form's own."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.down_proj = mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden size) → (..., hidden size)."""
        out: torch.Tensor = self.down_proj(self.inner(x))
        return out

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The result plus `residual`, in one pass over it."""
        return added(self.down_proj, self.inner(x), residual)

    @abstractmethod
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden size) → (..., feed-forward size)."""


class PackedGatedMLP(GatedMLP):
    """On packed weights; activation and multiplication are fused into the products."""

    def __init__(self, mlp: Any) -> None:
        super().__init__(mlp)
        self._activation = _ACTIVATIONS[type(mlp.act_fn).__name__]
        self.gate_proj, self.up_proj = mlp.gate_proj, mlp.up_proj

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden size) → (..., feed-forward size)."""
        gate = self.gate_proj.activated(x, *self._activation)
        inner: torch.Tensor = self.up_proj.multiplied(x, gate)
        return inner


class JoinedGatedMLP(GatedMLP):
    """Phi-3's: one layer gives gates and values."""

    def __init__(self, mlp: Any) -> None:
        super().__init__(mlp)
        self.gate_up_proj, self.activation_fn = mlp.gate_up_proj, mlp.activation_fn

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden size) → (..., feed-forward size)."""
        gate, values = self.gate_up_proj(x).chunk(2, dim=-1)
        inner: torch.Tensor = self.activation_fn(gate).mul_(values)
        return inner


class PackedPlainMLP(nn.Module):
    """`down(act(up(x)))` on packed weights, the activation in the first product's own pass."""

    def __init__(self, mlp: Any, form: PlainMLPForm) -> None:
        super().__init__()
        self._up, self._down = form.up, form.down  # LoRA weights find them by name
        for name in (form.up, form.down):
            setattr(self, name, getattr(mlp, name))
        self._activation = _ACTIVATIONS[type(mlp.act).__name__]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden size) → (..., hidden size)."""
        out: torch.Tensor = getattr(self, self._down)(self._inner(x))
        return out

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The result plus `residual`, in one pass over it."""
        return added(getattr(self, self._down), self._inner(x), residual)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = getattr(self, self._up).activated(x, *self._activation)
        return inner


class PackedNorm(nn.Module):
    """A root-mean-square norm in one kernel; Gemma's stored weight is one less than its factor."""

    def __init__(self, norm: Any, *, offset: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(norm.weight.detach() + offset, requires_grad=False)
        self.epsilon = _epsilon(norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., width) → (..., width)."""
        return rms_norm(x, self.factor, self.epsilon)


def added(module: Any, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """`module(x) + residual`, in the module's own pass where it has one."""
    fused = getattr(module, "added", None)
    out: torch.Tensor = module(x).add_(residual) if fused is None else fused(x, residual)
    return out


def choose_layout(model: nn.Module, weights: Weights) -> Weights:
    """What `auto` means for a model here: `published` where our kernels run, else `packed` or `plain`.

    Raises:
        ParameterError: a layout was asked for that the device or the dtype does not allow.
    """
    linears: list[Any] = [module for module in model.modules() if is_linear(module)]
    is_packable = bool(linears) and all(can_pack(linear.weight) for linear in linears)
    if weights == "packed" and not is_packable:
        raise ParameterError("weights", "packed needs float32 on a CPU with oneDNN; use auto or plain")
    is_publishable = can_publish(linears)
    if weights == "published" and not is_publishable:
        raise ParameterError(
            "weights", "published needs float32 on a CPU with fused products (FMA); use auto or plain"
        )
    if weights != "auto":
        return weights
    return "published" if linears and is_publishable else "packed" if is_packable else "plain"


def is_linear(module: object) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether a module is a linear layer of torch's or GPT-2's kind, and none derived from them."""
    return type(module) is nn.Linear or _is_conv1d(module)


def weight_of(linear: Any) -> torch.Tensor:
    """The weight of a linear layer as (outputs, inputs), on its own memory."""
    weight: torch.Tensor = linear.weight
    return weight.t() if _is_conv1d(linear) else weight


def num_features(linear: Any) -> tuple[int, int]:
    """How many numbers a linear layer takes, and how many it gives."""
    return (linear.nx, linear.nf) if _is_conv1d(linear) else (linear.in_features, linear.out_features)


def _is_conv1d(module: object) -> bool:
    """By name: transformers' module is not imported for the models that have none."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def can_publish(linears: Sequence[nn.Linear]) -> bool:
    """Whether linear layers can be kept as they were published, on this processor."""
    weights = [linear.weight for linear in linears]
    return can_widen() and all(w.device.type == "cpu" and w.dtype == torch.float32 for w in weights)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN is here for such a weight."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and hooks.has_onednn()


def pack_(model: nn.Module) -> None:
    """Replace every linear layer and every known gated MLP of a model by its packed form."""
    for parent, name, module in list(children(model)):
        if is_linear(module) and not reads_weight(parent, name):
            setattr(parent, name, PackedLinear(module))
    for parent, name, module in list(children(model)):
        if (faster := _faster(module)) is not None:
            setattr(parent, name, faster)


def _faster(module: nn.Module) -> nn.Module | None:
    """A feed-forward part on packed weights, or a norm in one kernel; None for every other module."""
    if is_gated_mlp(module, linear=PackedLinear):
        return PackedGatedMLP(module)
    if is_joined_mlp(module, linear=PackedLinear):
        return JoinedGatedMLP(module)
    if (form := plain_mlp_form(module, linear=PackedLinear)) is not None:
        return PackedPlainMLP(module, form)
    return as_packed_norm(module)


def reads_weight(parent: nn.Module, name: str) -> bool:
    """Whether a module takes a child's weight itself, which the child must then keep as it is."""
    return mentions(type(parent), f".{name}.weight")


def children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every module with its parent and its name there."""
    for parent in model.modules():
        for name, child in parent.named_children():
            yield parent, name, child


def norm_width(norm: Any) -> int:
    """How many numbers a root-mean-square norm takes together."""
    return int((norm.factor if isinstance(norm, PackedNorm) else norm.weight).numel())


def _epsilon(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


@torch.inference_mode()
def as_packed_norm(module: Any) -> PackedNorm | None:
    """The packed form of a norm that was read, where it also gives the module's own result."""
    forward = type(module).forward
    if has_form(forward, forms.RMS_NORM):
        offset = 0.0
    elif has_form(forward, forms.OFFSET_RMS_NORM) and has_form(
        type(module)._norm,  # noqa: SLF001
        forms.OFFSET_RMS_NORM_PART,
    ):
        offset = 1.0
    else:
        return None
    if not can_pack(module.weight):
        return None
    packed = PackedNorm(module, offset=offset)
    x = torch.linspace(-3, 3, module.weight.numel())
    x = torch.stack([x, x / 1000, x * 1000])  # in the second row epsilon counts
    return packed if torch.allclose(packed(x), module(x), rtol=1e-5, atol=1e-5) else None


def is_gated_mlp(
    module: Any, activations: Container[str] = _ACTIVATIONS, *, linear: type = nn.Linear
) -> bool:
    """Whether a module is `down(act(gate(x)) * up(x))`, by its source, on linear layers of one kind."""
    parts = dict(module.named_children())
    if parts.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    activation = type(parts.pop("act_fn")).__name__
    return (
        activation in activations
        and all(type(part) is linear for part in parts.values())
        and has_form(type(module).forward, forms.GATED_MLP)
    )


def is_joined_mlp(module: Any, *, linear: type = nn.Linear) -> bool:
    """Whether a module is Phi-3's feed-forward part, by its source, on linear layers of one kind."""
    parts = parts_of(module)
    return (
        parts.keys() == {"gate_up_proj", "down_proj", "activation_fn"}
        and all(type(parts[name]) is linear for name in ("gate_up_proj", "down_proj"))
        and type(parts["activation_fn"]).__name__ in _ACTIVATIONS
        and has_form(type(module).forward, forms.JOINED_MLP)
    )


def plain_mlp_form(module: Any, *, linear: type | None = None) -> PlainMLPForm | None:
    """The form of a module that is `down(act(up(x)))`, by its source; None for every other."""
    form = form_of(module, forms.PLAIN_MLPS)
    if form is None or (parts := parts_of(module)).keys() != {form.up, form.down, "act"}:
        return None
    layers = [parts[name] for name in (form.up, form.down)]
    are_known = all(is_linear(one) if linear is None else type(one) is linear for one in layers)
    return form if are_known and type(parts["act"]).__name__ in _ACTIVATIONS else None
