"""The transformers decoder: a module of transformers, with attention over the KV cache, on any device.

It runs the models whose family or configuration `families` does not know; on a CPU their linear layers run on
panels. A family may keep its decoder anywhere (`model`, `transformer`, `gpt_neox`,
a text model inside a vision one), so it is found by watching the model run once. After its last layer a model
may scale its logits, squash them, or leave them be. None of that is written again here: the head is the model
itself with a stand-in where the decoder was.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import nn

from logprobe.engine.forward.attention import NAME, all_attention_paths, plan_attention
from logprobe.engine.forward.kv_cache import KVPool
from logprobe.engine.forward.lora import LoraRoom, LoraRows
from logprobe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from logprobe.engine.forward.attention import AttentionPlan, CurrentStep
    from logprobe.engine.protocol import StepBatch
    from logprobe.models.lora import LoraWeights


@dataclass(frozen=True, slots=True)
class DecoderPlace:
    """Where a model keeps its decoder, and in what form the decoder hands its rows over."""

    path: str  # below the model, dotted
    output: Any  # of one run: a `ModelOutput` or a tuple, whose first part is the last hidden states

    def rows(self, output: Any) -> Tensor:
        """The last hidden states, (1, num_tokens, hidden size)."""
        rows: Tensor = output[0]
        return rows

    def filled(self, rows: Tensor) -> Any:
        """An output of the decoder's own form; what is not the last hidden states is None."""
        from transformers.utils.generic import ModelOutput

        if isinstance(self.output, ModelOutput):
            name = next(iter(self.output))
            return type(self.output)(**{name: rows})
        return (rows, *[None] * (len(self.output) - 1))


class WatchedRun:
    """Notes, while a model runs, which of its submodels returned last: the outermost one is its decoder."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self._last: DecoderPlace | None = None

    def __enter__(self) -> Self:
        from transformers import PreTrainedModel

        for path, module in self._model.named_modules():
            if path and isinstance(module, PreTrainedModel):
                self._hooks.append(module.register_forward_hook(self._note(path)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, path: str) -> Any:
        def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._last = DecoderPlace(path, output)

        return note

    @property
    def place(self) -> DecoderPlace:
        """The decoder's place.

        Raises:
            UnsupportedModelError: no submodel ran.
        """
        if self._last is None:
            raise UnsupportedModelError("it has no decoder apart from its output head")
        return self._last


class TransformersDecoder:
    """Callable: a step's packed tokens → last hidden states, (num_tokens, hidden size); and the head."""

    def __init__(self, model: Any, place: DecoderPlace, step: CurrentStep) -> None:
        """Make a module's attention read the KV cache from now on; its modules hold `step`."""
        self.model = model
        self.step = step
        self.loras = LoraRows()
        self._place = place
        model.set_attn_implementation(NAME)
        self._decoder = model.get_submodule(place.path)
        self._head = OutputHead(model, place)
        self._room = LoraRoom(model, self.loras, self._head.model)

    @property
    def hidden_size(self) -> int:
        """How many numbers a row of the last hidden states has."""
        return int(self._place.rows(self._place.output).shape[-1])

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        device: torch.device = self.model.device
        return device

    def new_pool(self, num_slots: int) -> KVPool:
        """A pool that is laid out when its layers first store."""
        return KVPool(num_slots)

    def check_lora(self, lora: LoraWeights) -> None:
        """Every linear layer takes weights."""

    def make_room(self, lora: LoraWeights) -> None:
        """Let steps name such weights; from any thread."""
        self._room.make(lora)

    def record_on(self, pool: KVPool, max_len: int) -> None:
        """Run every step module by module."""

    def plan(self, pool: KVPool, batch: StepBatch) -> AttentionPlan:
        """Lay out a step of the scheduler."""
        return plan_attention(pool, batch, str(self.device))

    def all_plans(
        self, pool: KVPool, prompts: Sequence[torch.Tensor]
    ) -> Iterator[tuple[list[int], AttentionPlan]]:
        """Plan some prompts by each path of attention that steps may take."""
        return all_attention_paths(pool, prompts)

    def __call__(
        self, token_ids: NDArray[Any], positions: NDArray[Any], plan: AttentionPlan, *, is_long: bool = False
    ) -> Tensor:
        """Run packed tokens, (num_tokens,) ids and positions; `is_long` names their rotary frequencies."""
        self.step.plan, self.step.is_long = plan, is_long
        out = self._decoder(
            input_ids=self._row(token_ids), position_ids=self._row(positions), use_cache=False
        )
        return self._place.rows(out)[0]

    def head(self, hidden: Tensor, lora: LoraWeights | None = None) -> Tensor:
        """(rows, hidden size) → (rows, vocabulary) float32 logits, all under the same LoRA weights."""
        with self.loras.only(lora, len(hidden), hidden.device):
            return self._head(hidden)

    def _row(self, numbers: NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64))[None].to(self.device)


class _StandIn(nn.Module):
    """Stands where the decoder stood: returns given rows, and is the decoder to who reads its attributes."""

    def __init__(self, decoder: nn.Module, place: DecoderPlace) -> None:
        super().__init__()
        self.__dict__["_decoder"] = decoder  # no submodule: what walks over modules finds it once
        self._place = place

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_decoder"], name)

    def forward(self, *args: Any, inputs_embeds: Tensor | None = None, **_: Any) -> Any:
        """Return the rows as they came, by position or by keyword."""
        given = [inputs_embeds, *args]
        rows = [part for part in given if isinstance(part, torch.Tensor) and part.is_floating_point()]
        return self._place.filled(rows[0])


class OutputHead:
    """Callable: (rows, hidden size) → (rows, vocabulary) float32 logits, scale and soft cap included."""

    def __init__(self, model: Any, place: DecoderPlace) -> None:
        *parents, name = place.path.split(".")
        self.model = inner = _own_children(model)
        for parent in parents:
            inner._modules[parent] = _own_children(inner._modules[parent])  # noqa: SLF001
            inner = inner._modules[parent]  # noqa: SLF001
        inner._modules[name] = _StandIn(model.get_submodule(place.path), place)  # noqa: SLF001

    def __call__(self, hidden: Tensor) -> Tensor:
        """Give (rows, vocabulary) float32 logits for (rows, hidden size)."""
        logits: Tensor = self.model(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()


def _own_children(module: Any) -> Any:
    """A shallow copy shares the dictionary of submodules; this one gets its own."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)  # noqa: SLF001
    return copied
