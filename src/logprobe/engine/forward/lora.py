"""Adapters in the forward pass: rows of one step, each under the adapter that its request names.

A linear layer that some adapter changes is wrapped once. Each step tells the wrappers which rows run under
which adapter; rows without one, and steps without any, take the model's own path untouched.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import nn
from torch.nn import functional

from logprobe.engine.layers.packed import added
from logprobe.errors import require
from logprobe.models.lora import load_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe.engine.protocol import StepBatch
    from logprobe.models.lora import Adapter, LowRank

Groups: TypeAlias = "list[tuple[str, torch.Tensor]]"
"""Adapter → its rows of the step's packed tokens, (num_rows,) int64."""


class StepRows:
    """Which rows of the present step run under which adapter; shared by all wrappers."""

    def __init__(self) -> None:
        self.groups: Groups = []


class AdaptedLinear(nn.Module):
    """A linear layer, plus each row's own low-rank product."""

    def __init__(self, linear: nn.Module, rows: StepRows) -> None:
        super().__init__()
        self.linear = linear
        self.parts: dict[str, LowRank] = {}
        self._rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) → (..., out_features)."""
        out: torch.Tensor = self.linear(x)
        self.adapt_(out.view(-1, out.shape[-1]), x.reshape(-1, x.shape[-1]))
        return out

    def adapt_(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Add what the adapters make of `x`, (num_tokens, in_features), to `out`, one row a token too."""
        for adapter, rows in self._rows.groups:
            part = self.parts.get(adapter)  # it may leave this layer alone
            if part is not None:
                out.index_add_(0, rows, x.index_select(0, rows) @ part.down @ part.up)

    def activated(self, x: torch.Tensor, name: str, algorithm: str) -> torch.Tensor:
        """`forward` and an activation, for a fused MLP around it; fused itself while no adapter runs."""
        linear: Any = self.linear
        if not self._rows.groups:
            out: torch.Tensor = linear.activated(x, name, algorithm)
            return out
        return (
            functional.silu(self(x)) if name == "swish" else functional.gelu(self(x), approximate=algorithm)
        )

    def multiplied(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """`forward` times `factor`, likewise."""
        linear: Any = self.linear
        if not self._rows.groups:
            out: torch.Tensor = linear.multiplied(x, factor)
            return out
        product: torch.Tensor = self(x)
        return product.mul_(factor.view_as(product))

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`forward` plus `residual`, likewise."""
        if not self._rows.groups:
            return added(self.linear, x, residual)
        product: torch.Tensor = self(x)
        return product.add_(residual)


@final
class Loras:
    """The loaded adapters of one model; loading may happen on any thread while steps run."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rows = StepRows()
        self._lock = threading.Lock()
        # Guarded by `_lock`. A name serves one adapter for good, since caches know adapters by name.
        self._loaded: dict[str, Adapter] = {}
        self._gone: set[str] = set()
        self.hidden: frozenset[str] = frozenset()  # refused to new requests, not dropped yet

    @property
    def are_running(self) -> bool:
        """Whether any row of the present step runs under an adapter."""
        return bool(self._rows.groups)

    def paths(self) -> dict[str, str]:
        """Name → path of every adapter that requests may use."""
        with self._lock:
            return {name: adapter.path for name, adapter in self._loaded.items()}

    def check(self, name: str | None) -> None:
        """Raise `ParameterError` where a request names an adapter that is not there."""
        known = self.paths()
        listed = ", ".join(known) or "none"
        require(name is None or name in known, "lora", f"no adapter {name!r} is loaded; known: {listed}")

    def add(self, name: str, path: str | Path) -> None:
        """Load an adapter and make it known.

        Raises:
            ModelError: the folder cannot be read, or does not fit the model.
            ParameterError: the name is no text, or is or was another adapter's.
        """
        require(isinstance(name, str) and name, "name", f"must be a text, got {name!r}")
        self._check_new(name)
        adapter = load_adapter(name, path, self._model)
        with self._lock:
            require(name not in self._loaded, "name", f"adapter {name!r} is loaded already")
            for module_name, part in adapter.parts.items():
                self._wrapped(module_name).parts[name] = part
            self._loaded[name] = adapter

    def hide(self, name: str) -> None:
        """Refuse new requests for an adapter; `drop` follows once none runs.

        Raises:
            ParameterError: no such adapter.
        """
        self.check(name)
        with self._lock:
            del self._loaded[name]
            self._gone.add(name)
            self.hidden |= {name}

    def drop(self, name: str) -> None:
        """Let a hidden adapter's weights go."""
        for module in self._model.modules():
            if isinstance(module, AdaptedLinear):
                module.parts.pop(name, None)
        with self._lock:
            self.hidden -= {name}

    def select(self, batch: StepBatch) -> None:
        """Note which rows of the step about to run run under which weights."""
        rows: dict[str, list[torch.Tensor]] = {}
        for index, lora in enumerate(batch.loras):
            if lora is not None:
                span = batch.span(index)
                rows.setdefault(lora, []).append(torch.arange(span.start, span.stop))
        device = self._model.device
        self._rows.groups = [(name, torch.cat(parts).to(device)) for name, parts in rows.items()]

    def _check_new(self, name: str) -> None:
        with self._lock:
            require(name not in self._loaded, "name", f"adapter {name!r} is loaded already")
            require(name not in self._gone, "name", f"{name!r} was another adapter's; choose a new name")

    def _wrapped(self, module_name: str) -> AdaptedLinear:
        parent_name, _, name = module_name.rpartition(".")
        parent: Any = self._model.get_submodule(parent_name)
        module = getattr(parent, name)
        if not isinstance(module, AdaptedLinear):
            module = AdaptedLinear(module, self._rows)
            setattr(parent, name, module)
        return module
