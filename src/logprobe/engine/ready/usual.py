"""The usual decoder (Llama's, Mistral's, Qwen's) as modules of our own, under transformers' names.

LoRA weights find the layers by name. Whether a model of transformers is one of these is known by the source
of its `forward` (`forms`).
Before it: the record of a proven load. After it: the engine's decoder and output head.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from logprobe.engine.layers.fused import HEAD_NORMS, PROJECTIONS, FusedLayer
from logprobe.engine.layers.packed import PackedNorm
from logprobe.engine.layers.published import PublishedEmbedding, PublishedGatedMLP, PublishedLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from logprobe.engine.forward.attention import CurrentStep
    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models.stored.record import LoadRecord

    Tensors = Mapping[str, torch.Tensor]

DECODER: Final = "model"
HEAD: Final = "lm_head"
MLP_PARTS: Final = ("gate_proj", "up_proj", "down_proj")
EMBEDDING: Final = f"{DECODER}.embed_tokens"


class UsualRotary(nn.Module):
    """Cosines and sines of positions, as transformers makes them where frequencies never change."""

    inv_freq: torch.Tensor

    def __init__(self, inv_freq: torch.Tensor, scaling: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq)
        self._scaling = scaling

    def forward(self, _x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(1, num_tokens) positions → cosines and sines, (1, num_tokens, key_dim) each."""
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self._scaling, angles.sin() * self._scaling


class UsualDecoder(nn.Module):
    """Embedding, layers and a last norm."""

    def __init__(self, record: LoadRecord, tensors: Tensors, parts: Parts, step: CurrentStep) -> None:
        super().__init__()
        self.embed_tokens = parts.embedding()
        layers = (parts.layer(index) for index in range(record.num_layers))
        self.layers = nn.ModuleList(FusedLayer(layer, step) for layer in layers)
        self.norm = parts.norm(f"{DECODER}.norm")
        self.rotary_emb = UsualRotary(tensors["inv_freq"], record.rope_scaling)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, ...]:
        """(1, num_tokens) ids and positions → the last hidden states, (1, num_tokens, hidden size)."""
        hidden = self.embed_tokens(input_ids)
        rotary = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary)
        return (self.norm(hidden),)


class UsualModel(nn.Module):
    """A decoder and its output head; what else is read of a transformers model, LoRA weights ask for."""

    def __init__(self, decoder: UsualDecoder, head: nn.Module, load_config: Callable[[], Any]) -> None:
        super().__init__()
        self.model = decoder
        self.lm_head = head
        self._load_config = load_config
        self.dtype, self.device = torch.float32, torch.device("cpu")

    @property
    def base_model(self) -> UsualDecoder:
        """The decoder, by transformers' name."""
        return self.model

    @property
    def config(self) -> Any:
        """Transformers' configuration of the model."""
        return self._load_config()

    def get_output_embeddings(self) -> nn.Module:
        """The output head, by transformers' name."""
        return self.lm_head


class Parts:
    """The modules of a decoder by transformers' names, on stored panels."""

    def __init__(self, record: LoadRecord, tensors: Tensors, panels: Mapping[str, PanelWeights]) -> None:
        self._record, self._tensors, self._panels = record, tensors, panels

    def linear(self, name: str) -> PublishedLinear:
        """A linear layer."""
        panels, bias = self._panels[name], self._tensors.get(f"{name}.bias")
        return PublishedLinear([panels if bias is None else panels.with_bias(bias)])

    def embedding(self) -> PublishedEmbedding:
        """The embedding."""
        return PublishedEmbedding(self._panels[EMBEDDING])

    def norm(self, name: str) -> PackedNorm:
        """A norm."""
        epsilon = self._record.epsilons[name]
        return PackedNorm(SimpleNamespace(weight=self._tensors[name], variance_epsilon=epsilon), offset=0.0)

    def layer(self, index: int) -> SimpleNamespace:
        """The parts of a decoder layer, for `FusedLayer` to take."""
        name = f"{DECODER}.layers.{index}"
        halves = {part: self.linear(f"{name}.mlp.{part}") for part in MLP_PARTS}
        return SimpleNamespace(
            self_attn=self._attention(f"{name}.self_attn", index),
            mlp=PublishedGatedMLP(SimpleNamespace(**halves, act_fn=nn.SiLU())),
            input_layernorm=self.norm(f"{name}.input_layernorm"),
            post_attention_layernorm=self.norm(f"{name}.post_attention_layernorm"),
        )

    def _attention(self, name: str, index: int) -> SimpleNamespace:
        linears = {part: self.linear(f"{name}.{part}") for part in (*PROJECTIONS, "o_proj")}
        norms = {
            part: self.norm(f"{name}.{part}") for part in HEAD_NORMS if f"{name}.{part}" in self._tensors
        }
        return SimpleNamespace(layer_idx=index, head_dim=self._record.key_dim, **linears, **norms)
