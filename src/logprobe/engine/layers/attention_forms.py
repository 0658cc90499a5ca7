"""Attention modules of transformers that were read, with the rotations that they call.

As `forms`. The layers' own attention is the pool's by then; what is read here is what is around it.
"""

from __future__ import annotations

from dataclasses import dataclass

_ATTENTION = """
def forward(self, hidden_states, position_embeddings{default}, attention_mask{default}, past_key_values=None,
            **kwargs):
    input_shape = hidden_states.shape[:-1]
    hidden_shape = (*input_shape, -1, self.head_dim)
    {project}
    {rotate}
    if past_key_values is not None:
        key_states, value_states = past_key_values.update(key_states, value_states, self.layer_idx)
    attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
        self.config._attn_implementation, eager_attention_forward)
    attn_output, attn_weights = attention_interface(
        self, query_states, key_states, value_states, attention_mask,
        dropout={dropout}, scaling=self.scaling, {options} **kwargs)
    attn_output = attn_output.reshape(*input_shape, -1).contiguous()
    attn_output = self.o_proj(attn_output)
    {finish}
    return attn_output, attn_weights
"""
_PROJECT = """
    query_states = {query}.transpose(1, 2)
    key_states = {key}.transpose(1, 2)
    value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
""".strip()
_QUERY = "self.q_proj(hidden_states).view(hidden_shape)"
_KEY = "self.k_proj(hidden_states).view(hidden_shape)"
_PLAIN_PROJECT = _PROJECT.format(query=_QUERY, key=_KEY)
_PLAIN = {
    "default": "",
    "project": _PLAIN_PROJECT,
    "rotate": "cos, sin = position_embeddings\n    "
    "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)",
    "dropout": "0.0 if not self.training else self.attention_dropout",
    "options": "",
    "finish": "",
}
_OWN_WINDOW = {"options": "sliding_window=self.sliding_window,"}
_CONFIG_WINDOW = {"options": "sliding_window=getattr(self.config, 'sliding_window', None),"}
_HEAD_NORMS = {"project": _PROJECT.format(query=f"self.q_norm({_QUERY})", key=f"self.k_norm({_KEY})")}
_LATE_HEAD_NORMS = {
    "project": f"{_PLAIN_PROJECT}\n    "
    "query_states = self.q_norm(query_states)\n    key_states = self.k_norm(key_states)"
}
_WIDE_NORMS = {  # of all heads together
    "project": """
    query_states = self.q_norm(self.q_proj(hidden_states))
    key_states = self.k_norm(self.k_proj(hidden_states))
    value_states = self.v_proj(hidden_states)
    query_states = query_states.view(hidden_shape).transpose(1, 2)
    key_states = key_states.view(hidden_shape).transpose(1, 2)
    value_states = value_states.view(hidden_shape).transpose(1, 2)
""".strip()
}
_OUT_DROPOUT = (
    "attn_output = nn.functional.dropout(attn_output, p=self.residual_dropout, training=self.training)"
)
# Whether this layer rotates is the module's `use_rope`.
_SOME_ROTATE = (
    "if self.use_rope:\n        cos, sin = position_embeddings\n        "
    "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)"
)
_GEMMA = {"default": "=None", "dropout": "self.attention_dropout if self.training else 0.0"}
_SOFTCAP = {"options": f"{_OWN_WINDOW['options']} softcap=self.attn_logit_softcapping,"}

_PHI3_PROJECT = """
    qkv = self.qkv_proj(hidden_states)
    query_pos = self.config.num_attention_heads * self.head_dim
    query_states = qkv[..., :query_pos]
    key_states = qkv[..., query_pos : query_pos + self.num_key_value_heads * self.head_dim]
    value_states = qkv[..., query_pos + self.num_key_value_heads * self.head_dim :]
    query_states = query_states.view(hidden_shape).transpose(1, 2)
    key_states = key_states.view(hidden_shape).transpose(1, 2)
    value_states = value_states.view(hidden_shape).transpose(1, 2)
""".strip()
_GPT2_ATTENTION = """
def forward(
    self, hidden_states, past_key_values=None, attention_mask=None, encoder_hidden_states=None,
    encoder_attention_mask=None, output_attentions=False, **kwargs,
):
    is_cross_attention = encoder_hidden_states is not None
    if past_key_values is not None:
        if isinstance(past_key_values, EncoderDecoderCache):
            is_updated = past_key_values.is_updated.get(self.layer_idx)
            if is_cross_attention:
                curr_past_key_values = past_key_values.cross_attention_cache
            else:
                curr_past_key_values = past_key_values.self_attention_cache
        else:
            curr_past_key_values = past_key_values
    if is_cross_attention:
        if not hasattr(self, "q_attn"):
            raise ValueError(
                "If class is used as cross attention, the weights `q_attn` have to be defined. "
                "Please make sure to instantiate class with `GPT2Attention(..., is_cross_attention=True)`.")
        query_states = self.q_attn(hidden_states)
        attention_mask = encoder_attention_mask
        if past_key_values is not None and is_updated:
            key_states = curr_past_key_values.layers[self.layer_idx].keys
            value_states = curr_past_key_values.layers[self.layer_idx].values
        else:
            key_states, value_states = self.c_attn(encoder_hidden_states).split(self.split_size, dim=2)
            shape_kv = (*key_states.shape[:-1], -1, self.head_dim)
            key_states = key_states.view(shape_kv).transpose(1, 2)
            value_states = value_states.view(shape_kv).transpose(1, 2)
    else:
        query_states, key_states, value_states = self.c_attn(hidden_states).split(self.split_size, dim=2)
        shape_kv = (*key_states.shape[:-1], -1, self.head_dim)
        key_states = key_states.view(shape_kv).transpose(1, 2)
        value_states = value_states.view(shape_kv).transpose(1, 2)
    shape_q = (*query_states.shape[:-1], -1, self.head_dim)
    query_states = query_states.view(shape_q).transpose(1, 2)
    if (past_key_values is not None and not is_cross_attention) or (
        past_key_values is not None and is_cross_attention and not is_updated
    ):
        key_states, value_states = curr_past_key_values.update(key_states, value_states, self.layer_idx)
        if is_cross_attention:
            past_key_values.is_updated[self.layer_idx] = True
    using_eager = self.config._attn_implementation == "eager"
    attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
        self.config._attn_implementation, eager_attention_forward)
    if using_eager and self.reorder_and_upcast_attn:
        attn_output, attn_weights = self._upcast_and_reordered_attn(
            query_states, key_states, value_states, attention_mask)
    else:
        attn_output, attn_weights = attention_interface(
            self, query_states, key_states, value_states, attention_mask,
            dropout=self.attn_dropout.p if self.training else 0.0, scaling=self.scaling, **kwargs)
    attn_output = attn_output.reshape(*attn_output.shape[:-2], -1).contiguous()
    attn_output = self.c_proj(attn_output)
    attn_output = self.resid_dropout(attn_output)
    return attn_output, attn_weights
"""
_NEOX_ATTENTION = """
def forward(
    self, hidden_states, attention_mask, layer_past=None, position_embeddings=None, **kwargs,
):
    input_shape = hidden_states.shape[:-1]
    hidden_shape = (*input_shape, -1, 3 * self.head_size)
    qkv = self.query_key_value(hidden_states).view(hidden_shape).transpose(1, 2)
    query_states, key_states, value_states = qkv.chunk(3, dim=-1)
    cos, sin = position_embeddings
    query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
    if layer_past is not None:
        key_states, value_states = layer_past.update(key_states, value_states, self.layer_idx)
    attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
        self.config._attn_implementation, eager_attention_forward)
    attn_output, attn_weights = attention_interface(
        self, query_states, key_states, value_states, attention_mask,
        scaling=self.scaling, dropout=0.0 if not self.training else self.attention_dropout, **kwargs)
    attn_output = attn_output.reshape(*input_shape, -1).contiguous()
    attn_output = self.dense(attn_output)
    return attn_output, attn_weights
"""


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """A layer's attention that was read: its source, and the names of its parts."""

    forward: str
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # or one, which gives all three
    output: str = "o_proj"
    head_dim: str = "head_dim"
    is_by_head: bool = False  # one projection gives each head's query, key and value side by side
    rotates: bool = True  # unless the module's own `use_rope` says that it does not


_BY_LLAMAS_NAMES = (
    _ATTENTION.format(**_PLAIN | special)
    for special in (
        {"default": "=None"},  # Llama, Granite, Gemma
        _OWN_WINDOW,  # Qwen2, Ministral
        _CONFIG_WINDOW,  # Mistral, Mixtral
        _OWN_WINDOW | _HEAD_NORMS,  # Qwen3
        _OWN_WINDOW | {"rotate": _SOME_ROTATE},  # SmolLM3
        _CONFIG_WINDOW | {"finish": _OUT_DROPOUT},  # Starcoder2
        _GEMMA | _SOFTCAP,  # Gemma 2
        _GEMMA | _OWN_WINDOW | _LATE_HEAD_NORMS,  # Gemma 3
        _WIDE_NORMS,  # OLMo 2
        _WIDE_NORMS | _OWN_WINDOW,  # OLMo 3
    )
)
ATTENTION = (
    *map(AttentionForm, _BY_LLAMAS_NAMES),
    AttentionForm(  # Phi-3
        _ATTENTION.format(**_PLAIN | _CONFIG_WINDOW | {"project": _PHI3_PROJECT}), projections=("qkv_proj",)
    ),
    AttentionForm(_GPT2_ATTENTION, projections=("c_attn",), output="c_proj", rotates=False),
    AttentionForm(
        _NEOX_ATTENTION,
        projections=("query_key_value",),
        output="dense",
        head_dim="head_size",
        is_by_head=True,
    ),
)
USUAL_ATTENTION = ATTENTION[0]

ROTATE_HALVES = (
    """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
""",
    """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    q_type, k_type = q.dtype, k.dtype
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed.to(q_type), k_embed.to(k_type)
""",
    """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
    q_embed = torch.cat([(q_rot * cos) + (rotate_half(q_rot) * sin), q_pass], dim=-1)
    k_embed = torch.cat([(k_rot * cos) + (rotate_half(k_rot) * sin), k_pass], dim=-1)
    return q_embed, k_embed
""",
    """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
    q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
    k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
    q_embed = torch.cat([q_embed, q_pass], dim=-1)
    k_embed = torch.cat([k_embed, k_pass], dim=-1)
    return q_embed, k_embed
""",
)
ROTATE_HALF = (
    """
def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)
""",
)
