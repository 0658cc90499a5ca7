"""Rotary frequencies that depend on the length of the text (longrope: Ding et al. 2024).

transformers selects the short or the long frequencies for a whole forward call, by the largest position in
the call. A packed step mixes texts, so the engine selects them per text: texts with short and with long
frequencies run in separate forward calls. A text that outgrows the short frequencies is recomputed from its
start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from logprobe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from logprobe.engine.forward.torch.transformers_attention import CurrentStep

LONGROPE = "longrope"
ORIGINAL_LEN = "original_max_position_embeddings"


class TextLongRope(nn.Module):
    """Rotary embedding that selects frequencies by `CurrentStep.is_long`, not by the largest position."""

    def __init__(self, rotary: nn.Module, step: CurrentStep, boundary: int) -> None:
        super().__init__()
        self.rotary = rotary
        self._step, self._boundary = step, boundary

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped embedding's cosines and sines for positions of shape (1, num_tokens)."""
        if not self._step.is_long:  # all positions lie below the boundary
            return self.rotary(x, position_ids, *args, **kwargs)
        # An extra position beyond the boundary makes the embedding select the long frequencies; the result
        # for that position is dropped.
        beyond = position_ids.new_full((len(position_ids), 1), self._boundary)
        angles = self.rotary(x, torch.cat([position_ids, beyond], dim=1), *args, **kwargs)
        return tuple(part[:, :-1] for part in angles)


def rope_boundary(model: Any) -> int | None:
    """Return the length in tokens of the longest text with short frequencies; None without longrope."""
    boundaries = {
        parameters[ORIGINAL_LEN]
        for module in model.modules()
        for parameters in _rope_parameters(module)
        if parameters.get("rope_type") == LONGROPE
    }
    if len(boundaries) > 1:
        raise UnsupportedModelError("its layers change their rotary frequencies at different lengths")
    return next(iter(boundaries), None)


def original_lengths(model: Any) -> set[int]:
    """Return the original context lengths in the rotary settings, beyond which frequencies may change."""
    lengths = {
        parameters.get(ORIGINAL_LEN) for module in model.modules() for parameters in _rope_parameters(module)
    }
    return {length for length in lengths if isinstance(length, int)}


def follow_steps_(model: nn.Module, step: CurrentStep, boundary: int) -> None:
    """Replace every longrope embedding in a model with a `TextLongRope`, in place."""
    for name, module in list(model.named_modules()):
        if any(parameters.get("rope_type") == LONGROPE for parameters in _rope_parameters(module)):
            model.set_submodule(name, TextLongRope(module, step, boundary))


def _rope_parameters(module: Any) -> list[dict[str, Any]]:
    """Return the settings of a rotary embedding: one dict, or one per layer type.

    Returns an empty list for other modules.
    """
    if not hasattr(module, "rope_type"):
        return []
    settings = getattr(module.config, "rope_parameters", None) or {}
    return [settings] if "rope_type" in settings else [part for part in settings.values() if part]
