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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DECODER_LAYER = """
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

_ATTENTION = """
def forward(self, hidden_states, position_embeddings{default}, attention_mask{default}, past_key_values=None,
            **kwargs):
    input_shape = hidden_states.shape[:-1]
    hidden_shape = (*input_shape, -1, self.head_dim)
    query_states = {query}.transpose(1, 2)
    key_states = {key}.transpose(1, 2)
    value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
    {rotate}
    if past_key_values is not None:
        key_states, value_states = past_key_values.update(key_states, value_states, self.layer_idx)
    attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
        self.config._attn_implementation, eager_attention_forward)
    attn_output, attn_weights = attention_interface(
        self, query_states, key_states, value_states, attention_mask,
        dropout=0.0 if not self.training else self.attention_dropout, scaling=self.scaling, {window} **kwargs)
    attn_output = attn_output.reshape(*input_shape, -1).contiguous()
    attn_output = self.o_proj(attn_output)
    {dropout}
    return attn_output, attn_weights
"""
_PLAIN = {
    "default": "",
    "query": "self.q_proj(hidden_states).view(hidden_shape)",
    "key": "self.k_proj(hidden_states).view(hidden_shape)",
    "rotate": "cos, sin = position_embeddings\n    "
    "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)",
    "window": "",
    "dropout": "",
}
_OWN_WINDOW = {"window": "sliding_window=self.sliding_window,"}
_CONFIG_WINDOW = {"window": "sliding_window=getattr(self.config, 'sliding_window', None),"}
_HEAD_NORMS = {
    "query": "self.q_norm(self.q_proj(hidden_states).view(hidden_shape))",
    "key": "self.k_norm(self.k_proj(hidden_states).view(hidden_shape))",
}
_OUT_DROPOUT = (
    "attn_output = nn.functional.dropout(attn_output, p=self.residual_dropout, training=self.training)"
)
# Whether this layer rotates is the module's `use_rope`.
_SOME_ROTATE = (
    "if self.use_rope:\n        cos, sin = position_embeddings\n        "
    "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)"
)

ATTENTION = tuple(
    _ATTENTION.format(**_PLAIN | special)
    for special in (
        {"default": "=None"},  # Llama, Granite, Gemma
        _OWN_WINDOW,  # Qwen2, Ministral
        _CONFIG_WINDOW,  # Mistral, Mixtral
        _OWN_WINDOW | _HEAD_NORMS,  # Qwen3
        _OWN_WINDOW | {"rotate": _SOME_ROTATE},  # SmolLM3
        _CONFIG_WINDOW | {"dropout": _OUT_DROPOUT},  # Starcoder2
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
