"""Forms of modules that were read, and are known by the source of their `forward`.

A fast module takes the place of one of transformers' own only where what the latter does is known: its
`forward`, and the functions that it calls by name, have to be those written here, word for word (names of
classes, annotations, comments and decorators aside). Another release of transformers with other source runs
its own modules, right and slower, until its source has been read.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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


@dataclass(frozen=True, slots=True)
class LayerForm:
    """A decoder layer that was read: its source, and its norms by their places; None where there is none."""

    forward: str
    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None

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
)

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

ATTENTION = tuple(
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
)
ROTATE_HALF = (
    """
def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)
""",
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


def layer_form(layer: object) -> LayerForm | None:
    """The form of a decoder layer by its source; None where it was not read."""
    forward = getattr(type(layer), "forward", None)
    return next((form for form in LAYERS if callable(forward) and has_form(forward, [form.forward])), None)


def has_form(function: Callable[..., Any], forms: Iterable[str]) -> bool:
    """Whether the source of a function is one of `forms`."""
    own = _own_form(inspect.unwrap(function))
    return own is not None and own in {_form(form) for form in forms}


def calls_form(function: Callable[..., Any], name: str, forms: Iterable[str]) -> bool:
    """Whether the function that another one calls by a global name is of one of `forms`."""
    called = inspect.unwrap(function).__globals__.get(name)
    return callable(called) and has_form(called, forms)


def mentions(cls: type, words: str) -> bool:
    """Whether the source of a class, where there is one, holds some words."""
    try:
        return words in inspect.getsource(cls)
    except (OSError, TypeError):
        return False


@functools.cache
def _own_form(function: Callable[..., Any]) -> str | None:
    try:
        return _form(inspect.getsource(function))
    except (OSError, TypeError):  # no source on this machine
        return None


@functools.cache
def _form(source: str) -> str:
    """The syntax of a function without what changes nothing: its comments, annotations and decorators."""
    [function] = ast.parse(textwrap.dedent(source)).body
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list, function.returns = [], None
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.annotation = None
    function = _Unannotated().visit(function)
    if ast.get_docstring(function) is not None:
        del function.body[0]
    return ast.dump(function)


class _Unannotated(ast.NodeTransformer):
    """`x: int = 1` as `x = 1`."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Drop the annotation of an assignment."""
        if node.value is None:
            return node
        return ast.Assign(targets=[node.target], value=node.value)
