"""The output head on its own: hidden rows → logits, by the model's own code.

After its last layer a model may scale its logits, squash them, or leave them be. None of that is written
again here: the head is the model itself with its decoder replaced by a stub that returns given hidden rows.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

if TYPE_CHECKING:
    from torch import Tensor


class _GivenRows(nn.Module):
    """Stands where the decoder stood."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> BaseModelOutputWithPast:
        """Return the rows as they came."""
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


class OutputHead:
    """Callable: (rows, hidden size) → (rows, vocabulary) float32 logits, scale and soft cap included."""

    def __init__(self, model: Any) -> None:
        self._model = copy.copy(model)
        # A shallow copy shares the dictionary of submodules; this one gets its own.
        self._model._modules = {**model._modules, model.base_model_prefix: _GivenRows()}  # noqa: SLF001

    def __call__(self, hidden: Tensor) -> Tensor:
        """Give (rows, vocabulary) float32 logits for (rows, hidden size)."""
        logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()
