"""`ReadyModel`: what the engine runs, however it came to be.

Before it: `follow`, which proves a transformers module, or `recall`, which builds on an earlier proof.
After it: the pool's layout, and the engine's first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from logprobe.engine.forward.attention import CurrentStep
    from logprobe.engine.forward.decoder import Decoder
    from logprobe.engine.forward.pool import KVPool
    from logprobe.engine.protocol import Layout


@dataclass(slots=True, kw_only=True)
class ReadyModel:
    """A model with its numbers proven."""

    model: Any  # the module that LoRA weights find their layers in
    decoder: Decoder
    head: Callable[[torch.Tensor], torch.Tensor]
    step: CurrentStep
    probe: KVPool  # what every layer stores for a token
    layout: Layout
    vocab_size: int
    context_len: int
    hidden_size: int
    eos_token_ids: frozenset[int]
    is_recorded: bool | None = None  # whether few rows run as one launch, where that is known
