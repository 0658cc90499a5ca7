"""Rotary frequencies that change with the length of the text (longrope: Ding et al. 2024).

transformers chooses the short or the long frequencies per forward call, by the largest position in it. A
packed step mixes texts and parts of texts, so here the choice belongs to the text: each step runs those of
one kind together, and says which. A text that outgrows the short ones is computed again from its start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from logprobe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from logprobe.engine.forward.attention import CurrentStep

LONGROPE = "longrope"
ORIGINAL_LEN = "original_max_position_embeddings"


class TextLongRope(nn.Module):
    """A rotary embedding whose frequencies follow the step's choice, not the call's largest position."""

    def __init__(self, rotary: nn.Module, step: CurrentStep, boundary: int) -> None:
        super().__init__()
        self.rotary = rotary
        self._step, self._boundary = step, boundary

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Cosines and sines as the embedding gives them, for (1, num_tokens) positions."""
        if not self._step.is_long:  # all positions lie below the boundary
            return self.rotary(x, position_ids, *args, **kwargs)
        # One position beyond the boundary, whose row is dropped, makes the embedding choose the long ones.
        beyond = position_ids.new_full((len(position_ids), 1), self._boundary)
        angles = self.rotary(x, torch.cat([position_ids, beyond], dim=1), *args, **kwargs)
        return tuple(part[:, :-1] for part in angles)


def rope_boundary(model: Any) -> int | None:
    """The longest text under the short frequencies; None where the frequencies are always the same."""
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
    """The lengths that its rotary settings name as those of the first training: numbers may change there."""
    lengths = {
        parameters.get(ORIGINAL_LEN) for module in model.modules() for parameters in _rope_parameters(module)
    }
    return {length for length in lengths if isinstance(length, int)}


def follow_steps_(model: nn.Module, step: CurrentStep, boundary: int) -> None:
    """Let every rotary embedding of a model follow the step's choice."""
    for name, module in list(model.named_modules()):
        if any(parameters.get("rope_type") == LONGROPE for parameters in _rope_parameters(module)):
            model.set_submodule(name, TextLongRope(module, step, boundary))


def _rope_parameters(module: Any) -> list[dict[str, Any]]:
    """The rotary settings of a module that makes rotary embeddings: one, or one for each type of layer."""
    if not hasattr(module, "rope_type"):
        return []
    settings = getattr(module.config, "rope_parameters", None) or {}
    return [settings] if "rope_type" in settings else [part for part in settings.values() if part]
