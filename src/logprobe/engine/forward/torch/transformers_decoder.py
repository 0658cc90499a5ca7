"""The transformers decoder: a transformers model with attention over the KV cache, on any device.

It runs models whose family or configuration `families` does not support. In float32 on a CPU, their linear
layers use packed weight panels. Families name their decoder module differently (`model`, `transformer`,
`gpt_neox`, or a text model inside a vision model), so forward hooks find the decoder during one run. Models
may scale or soft-cap their logits; to keep that code, the output head is the model itself, with its decoder
replaced with a stub.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import nn

from logprobe.engine.forward.cpu.attention import plan_attention
from logprobe.engine.forward.kv_cache import KVPool
from logprobe.engine.forward.torch.transformers_attention import NAME, TensorPlan, all_tensor_paths
from logprobe.engine.forward.torch.transformers_lora import LoraRoom, TensorLoraRows
from logprobe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from logprobe.engine.forward.torch.transformers_attention import CurrentStep
    from logprobe.engine.protocol import Capture, StepBatch
    from logprobe.kernels.arrays import Array
    from logprobe.models.lora import LoraWeights

NO_STATES = (
    "return_hidden_states: this model's layers have no single hidden state per token; use 'last' instead of "
    "layer numbers"
)


@dataclass(frozen=True, slots=True)
class DecoderPlace:
    """Module name of a model's decoder, and an example of the decoder's output."""

    path: str  # dotted, relative to the model
    output: Any  # output of one run: a `ModelOutput` or a tuple, with the final hidden states first

    def rows(self, output: Any) -> Tensor:
        """Return the final hidden states in a decoder output, (1, num_tokens, hidden size)."""
        rows: Tensor = output[0]
        return rows

    def filled(self, rows: Tensor) -> Any:
        """Return a decoder output with `rows` as the final hidden states; all other fields are None."""
        from transformers.utils.generic import ModelOutput

        if isinstance(self.output, ModelOutput):
            name = next(iter(self.output))
            return type(self.output)(**{name: rows})
        return (rows, *[None] * (len(self.output) - 1))


class WatchedRun:
    """Context manager that finds a model's decoder while the model runs.

    The decoder is the submodule of class `PreTrainedModel` whose forward call returns last.
    """

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
        """The decoder found during the run.

        Raises:
            UnsupportedModelError: no submodel ran.
        """
        if self._last is None:
            raise UnsupportedModelError("it has no decoder module separate from its output head")
        return self._last


class TransformersDecoder:
    """Computes the final hidden states of a step's packed tokens, and logits from hidden states."""

    def __init__(self, model: Any, place: DecoderPlace, step: CurrentStep) -> None:
        """Switch the model to attention over the KV cache; call `step.reach(model)` first."""
        self.model = model
        self.step = step
        self.loras = TensorLoraRows(model.device, model.dtype)
        self._place = place
        model.set_attn_implementation(NAME)
        self._decoder = model.get_submodule(place.path)
        self._head = OutputHead(model, place)
        self._room = LoraRoom(model, self.loras, self._head.model)
        self._last_norm: nn.Module | None = None  # known after the first step with a capture

    @property
    def hidden_size(self) -> int:
        """Width of the final hidden states."""
        return int(self._place.rows(self._place.output).shape[-1])

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        device: torch.device = self.model.device
        return device

    def new_pool(self, num_slots: int) -> KVPool:
        """Return a KV cache that allocates each layer at its first store."""
        return KVPool(num_slots)

    def check_lora(self, lora: LoraWeights) -> None:
        """Do nothing, because every linear layer supports LoRA weights."""

    def make_room(self, lora: LoraWeights) -> None:
        """Prepare `lora` for steps; thread-safe."""
        self._room.make(lora)

    def record_on(self, pool: KVPool, max_len: int) -> None:
        """Do nothing, because this decoder does not record steps."""

    def plan(self, pool: KVPool, batch: StepBatch) -> TensorPlan:
        """Return the attention plan of a scheduled step."""
        return TensorPlan.of(plan_attention(pool, batch), self.device)

    def all_plans(self, pool: KVPool, prompts: Sequence[Array]) -> Iterator[tuple[list[int], TensorPlan]]:
        """Yield plans that run `prompts` through each attention path; see `all_tensor_paths`."""
        return all_tensor_paths(pool, prompts, self.device)

    def __call__(
        self,
        token_ids: NDArray[Any],
        positions: NDArray[Any],
        plan: TensorPlan,
        *,
        is_long: bool = False,
        capture: Capture | None = None,
    ) -> Tensor:
        """Run packed tokens; return their final hidden states, (num_tokens, hidden size).

        Args:
            token_ids: (num_tokens,) integers.
            positions: (num_tokens,) integers, position of each token in its text.
            plan: KV cache slot of each token, and the context that the token attends to.
            is_long: use the long rotary frequencies (longrope).
            capture: activations to keep; an error is added to it if the model does not return its layers'
                states.
        """
        self.step.plan, self.step.is_long = plan, is_long
        inputs = {"input_ids": self._row(token_ids), "position_ids": self._row(positions)}
        if capture is None:
            return self._place.rows(self._decoder(**inputs, use_cache=False))[0]
        with _FinalNorm(self._decoder) as norm:
            out = self._decoder(**inputs, use_cache=False, output_hidden_states=True)
        rows = self._place.rows(out)
        self._last_norm = norm.module_of(rows)
        states = getattr(out, "hidden_states", None) or ()
        # Some models have several streams of states, or layers of another width than the last.
        if len(states) > max(capture.layers) and all(
            states[layer].shape == rows.shape for layer in capture.layers
        ):
            for layer in capture.layers:
                capture.keep(layer, states[layer][0].float().cpu().numpy())
        else:
            capture.errors.append(UnsupportedModelError(NO_STATES))
        return rows[0]

    def normed(self, hidden: Array) -> Tensor:
        """Apply the final norm to float32 states (rows, hidden size); needs an earlier step with a capture.

        Raises:
            UnsupportedModelError: no module returns the final hidden states.
        """
        if self._last_norm is None:
            raise UnsupportedModelError(
                "logit_lens: this model has no module that only applies the final norm; "
                "use return_hidden_states"
            )
        rows: Tensor = self._last_norm(torch.from_numpy(hidden).to(self.device, self.model.dtype))
        return rows

    def head(self, hidden: Tensor, lora: LoraWeights | None = None) -> Tensor:
        """Return float32 logits (rows, vocabulary) of states (rows, hidden size); all rows use `lora`."""
        with self.loras.only(lora, len(hidden)):
            return self._head(hidden)

    def _row(self, numbers: NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64))[None].to(self.device)


class _FinalNorm:
    """Context manager that finds the module which computes a decoder's final hidden states."""

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder
        self._hooks: list[Any] = []
        self._outputs: list[tuple[nn.Module, Any]] = []  # of modules without submodules, in order

    def __enter__(self) -> Self:
        leaves = [module for module in self._decoder.modules() if next(module.children(), None) is None]
        self._hooks = [module.register_forward_hook(self._note) for module in leaves]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        self._outputs.append((module, output))

    def module_of(self, rows: Tensor) -> nn.Module | None:
        """Return the module whose output is `rows`; None if there is none."""
        return next((module for module, output in reversed(self._outputs) if output is rows), None)


class _StandIn(nn.Module):
    """Stub for the decoder: returns the hidden states that it gets as input; has the decoder's attributes."""

    def __init__(self, decoder: nn.Module, place: DecoderPlace) -> None:
        super().__init__()
        self.__dict__["_decoder"] = decoder  # not registered as a submodule
        self._place = place

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_decoder"], name)

    def forward(self, *args: Any, inputs_embeds: Tensor | None = None, **_: Any) -> Any:
        """Return the hidden states, which models pass as a positional or as a keyword argument."""
        given = [inputs_embeds, *args]
        rows = [part for part in given if isinstance(part, torch.Tensor) and part.is_floating_point()]
        return self._place.filled(rows[0])


class OutputHead:
    """Computes a model's logits from final hidden states, including scale and soft cap."""

    def __init__(self, model: Any, place: DecoderPlace) -> None:
        *parents, name = place.path.split(".")
        self.model = inner = _own_children(model)
        for parent in parents:
            inner._modules[parent] = _own_children(inner._modules[parent])  # noqa: SLF001
            inner = inner._modules[parent]  # noqa: SLF001
        inner._modules[name] = _StandIn(model.get_submodule(place.path), place)  # noqa: SLF001

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return (rows, vocabulary) float32 logits for (rows, hidden size) states."""
        logits: Tensor = self.model(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()


def _own_children(module: Any) -> Any:
    """Return a shallow copy of a module whose submodules can be replaced without changing the original."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)  # noqa: SLF001
    return copied
