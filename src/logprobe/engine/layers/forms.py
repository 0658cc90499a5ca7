"""Decoder layers, feed-forward parts and norms of transformers that were read: sources, and names of parts.

`source` tells whether a module is one of them, and `attention_forms` has what the layers attend by. Before
it: transformers' modeling files. After it: the fused and packed modules, which do the same in fewer passes.
"""

from __future__ import annotations

from dataclasses import dataclass

_USUAL = """
def forward(
    self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
    position_embeddings=None, **kwargs,
):
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states, attention_mask=attention_mask, position_ids=position_ids,
        past_key_values=past_key_values, use_cache=use_cache, position_embeddings=position_embeddings,
        **kwargs)
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states
"""

_FOUR_NORMS_OF_PARTS = """
def forward(
    self, hidden_states, position_embeddings=None, attention_mask=None, position_ids=None,
    past_key_values=None, **kwargs,
):
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask,
        position_ids=position_ids, past_key_values=past_key_values, **kwargs)
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.pre_feedforward_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = self.post_feedforward_layernorm(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states
"""
_NORMS_AFTER_PARTS = """
def forward(
    self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
    position_embeddings=None, **kwargs,
):
    residual = hidden_states
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states, attention_mask=attention_mask, position_ids=position_ids,
        past_key_values=past_key_values, use_cache=use_cache, position_embeddings=position_embeddings,
        **kwargs)
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.mlp(hidden_states)
    hidden_states = self.post_feedforward_layernorm(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states
"""


_DROPOUTS_OF_PHI = (
    _USUAL.replace("residual + hidden_states", "residual + self.resid_attn_dropout(hidden_states)", 1)
    .replace("residual + hidden_states", "residual + self.resid_mlp_dropout(hidden_states)", 1)
    .replace("hidden_states, _ = self.self_attn", "hidden_states, self_attn_weights = self.self_attn")
)
_GPT2_BLOCK = """
def forward(
    self, hidden_states, past_key_values=None, attention_mask=None, encoder_hidden_states=None,
    encoder_attention_mask=None, use_cache=False, **kwargs,
):
    residual = hidden_states
    hidden_states = self.ln_1(hidden_states)
    attn_output, _ = self.attn(
        hidden_states, past_key_values=past_key_values, attention_mask=attention_mask, use_cache=use_cache,
        **kwargs)
    hidden_states = attn_output + residual
    if encoder_hidden_states is not None:
        if not hasattr(self, "crossattention"):
            raise ValueError(
                f"If `encoder_hidden_states` are passed, {self} has to be instantiated with "
                "cross-attention layers by setting `config.add_cross_attention=True`")
        residual = hidden_states
        hidden_states = self.ln_cross_attn(hidden_states)
        cross_attn_output, _ = self.crossattention(
            hidden_states, past_key_values=past_key_values, attention_mask=attention_mask,
            encoder_hidden_states=encoder_hidden_states, encoder_attention_mask=encoder_attention_mask)
        hidden_states = residual + cross_attn_output
    residual = hidden_states
    hidden_states = self.ln_2(hidden_states)
    feed_forward_hidden_states = self.mlp(hidden_states)
    hidden_states = residual + feed_forward_hidden_states
    return hidden_states
"""
_NEOX_LAYER = """
def forward(
    self, hidden_states, attention_mask=None, position_ids=None, use_cache=False, layer_past=None,
    position_embeddings=None, **kwargs,
):
    attn_output, _ = self.attention(
        self.input_layernorm(hidden_states), attention_mask=attention_mask, position_ids=position_ids,
        layer_past=layer_past, use_cache=use_cache, position_embeddings=position_embeddings, **kwargs)
    attn_output = self.post_attention_dropout(attn_output)
    if self.use_parallel_residual:
        mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))
        mlp_output = self.post_mlp_dropout(mlp_output)
        hidden_states = mlp_output + attn_output + hidden_states
    else:
        attn_output = attn_output + hidden_states
        mlp_output = self.mlp(self.post_attention_layernorm(attn_output))
        mlp_output = self.post_mlp_dropout(mlp_output)
        hidden_states = mlp_output + attn_output
    return hidden_states
"""


@dataclass(frozen=True, slots=True)
class LayerForm:
    """A decoder layer that was read: its source, and its norms by their places; None where there is none.

    Beside them it has its attention, by the name that is given here, `mlp`, and dropouts, which do nothing.
    """

    forward: str
    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None
    attention: str = "self_attn"

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of all that it has."""
        places = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in places if name is not None)


USUAL_LAYER = LayerForm(_USUAL, "input_layernorm", None, "post_attention_layernorm", None)
LAYERS = (
    USUAL_LAYER,  # Llama and most others
    LayerForm(  # Gemma 2 and 3
        _FOUR_NORMS_OF_PARTS,
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    LayerForm(  # OLMo 2 and 3
        _NORMS_AFTER_PARTS, None, "post_attention_layernorm", None, "post_feedforward_layernorm"
    ),
    LayerForm(_DROPOUTS_OF_PHI, "input_layernorm", None, "post_attention_layernorm", None),  # Phi-3
    LayerForm(_GPT2_BLOCK, "ln_1", None, "ln_2", None, attention="attn"),
    LayerForm(  # GPT-NeoX; `use_parallel_residual` is the layer's own
        _NEOX_LAYER, "input_layernorm", None, "post_attention_layernorm", None, attention="attention"
    ),
)

GATED_MLP = (
    """
def forward(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj
""",
    """
def forward(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
""",
    """
def forward(self, hidden_state):
    return self.down_proj(self.act_fn(self.gate_proj(hidden_state)) * self.up_proj(hidden_state))
""",
)

JOINED_MLP = (  # Phi-3
    """
def forward(self, hidden_states):
    up_states = self.gate_up_proj(hidden_states)
    gate, up_states = up_states.chunk(2, dim=-1)
    up_states = up_states * self.activation_fn(gate)
    return self.down_proj(up_states)
""",
)


@dataclass(frozen=True, slots=True)
class PlainMLPForm:
    """A feed-forward part without gates that was read: its source, and the names of its two layers."""

    forward: str
    up: str
    down: str


PLAIN_MLPS = (
    PlainMLPForm(  # GPT-2
        """
def forward(self, hidden_states):
    hidden_states = self.c_fc(hidden_states)
    hidden_states = self.act(hidden_states)
    hidden_states = self.c_proj(hidden_states)
    hidden_states = self.dropout(hidden_states)
    return hidden_states
""",
        "c_fc",
        "c_proj",
    ),
    PlainMLPForm(  # GPT-NeoX
        """
def forward(self, hidden_states):
    hidden_states = self.dense_h_to_4h(hidden_states)
    hidden_states = self.act(hidden_states)
    hidden_states = self.dense_4h_to_h(hidden_states)
    return hidden_states
""",
        "dense_h_to_4h",
        "dense_4h_to_h",
    ),
)

RMS_NORM = (
    """
def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)
""",
    """
def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight * hidden_states).to(input_dtype)
""",
)
OFFSET_RMS_NORM = (  # Gemma stores one less than the factor
    """
def forward(self, x):
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)
""",
)
OFFSET_RMS_NORM_PART = (
    """
def _norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
""",
)
