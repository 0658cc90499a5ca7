"""Stands for the GPU decoder in `bench_gpu`: its interface, by transformers' module on whole texts."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest


@dataclass
class SpanPlan:
    pool: Any
    contexts: list[Any]
    lengths: list[int]
    device: Any


class Decoder:
    def __init__(self, module: Any) -> None:
        self._module = copy.deepcopy(module).float()

    def new_pool(self, num_slots: int) -> Any:
        return SimpleNamespace(ids=torch.zeros(num_slots, dtype=torch.int64), keys={}, values={})

    def record_on(self, pool: Any, max_len: int) -> None:
        """Nothing is recorded."""

    def __call__(self, token_ids: Any, positions: Any, plan: SpanPlan) -> torch.Tensor:
        rows, start, pool = [], 0, plan.pool
        for context, length in zip(plan.contexts, plan.lengths, strict=True):
            end = start + length
            assert positions[end - 1] == len(context) - 1
            pool.ids[context[-length:]] = torch.from_numpy(token_ids[start:end])
            hidden = self._module.model(pool.ids[context][None], use_cache=False).last_hidden_state
            rows.append(hidden[0, -length:])
            start = end
        assert start == len(token_ids)
        return torch.cat(rows)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._module.lm_head(hidden)
        return logits

    def profile(self, num_rows: int, context_len: int) -> dict[str, float]:
        return {"qkv": 1.0 * num_rows, "attention": 2.0 * context_len}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let imports of the decoder find the double."""
    package = "logprobe.engine.forward.cuda"
    build, plan = ModuleType(f"{package}.build"), ModuleType(f"{package}.plan")
    build.decoder_of = lambda module, arithmetic: Decoder(module)  # type: ignore[attr-defined]  # noqa: ARG005
    plan.SpanPlan = SpanPlan  # type: ignore[attr-defined]
    for module in (ModuleType(package), build, plan):
        monkeypatch.setitem(sys.modules, module.__name__, module)
