"""`GgufSource`: read a GGUF file's tensors under the names and in the layout of transformers' parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from logprobe.errors import UnsupportedModelError
from logprobe.models.gguf.blocks import panels_of_blocks
from logprobe.models.gguf.file import ROPE_FACTORS, GgufFile, dequantised
from logprobe.models.sources import EVERY

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from logprobe.kernels.arrays import Array
    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models.config_files import ModelConfig
    from logprobe.models.sources import Rows

FLOATS: Final[dict[str, Any]] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_TOP: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_BLOCK: Final = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GgufSource:
    """The tensors in a GGUF file; a tensor is mapped into memory only while it is in use."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        """Read the header of the file.

        Raises:
            InputError: the file is not a GGUF file, or is truncated.
            UnsupportedModelError: a tensor has no counterpart in transformers.
            OSError: the file cannot be read.
        """
        self._gguf, self._config = GgufFile(path), config
        has_factors = self._gguf.architecture == "llama"  # the factors are already part of the configuration
        own = {
            name: shape
            for name, shape in self._gguf.shapes.items()
            if not (has_factors and name == ROPE_FACTORS)
        }
        self._own_names = {transformers_name(self._gguf.architecture, name): name for name in own}
        self._shapes = {name: own[source] for name, source in self._own_names.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors by their names in transformers."""
        return self._shapes

    def check(self) -> None:
        """Check that there is exactly one tensor for each parameter of the model.

        Raises:
            UnsupportedModelError: names or shapes differ, or a tensor has a type that is not supported.
        """
        _check_shapes(self._gguf.path, self._config, self._shapes)
        for name, shape in self._shapes.items():
            try:
                self.read(name, slice(0, 1) if len(shape) > 1 else EVERY)
            except NotImplementedError as error:
                raise UnsupportedModelError(
                    f"{self._gguf.path.name}: {name} has the type "
                    f"{self._gguf.type_name(self._own_names[name])}, which is not supported; "
                    "use the model's safetensors folder or hub id instead"
                ) from error

    def read(self, name: str, rows: Rows = EVERY) -> Array:
        """Read rows of one tensor, as float32 if the tensor is quantized, else in the file's dtype."""
        own, shape = self._own_names[name], self._shapes[name]
        raw, type_name = self._gguf.raw(own), self._gguf.type_name(own)
        order = self._order(own)
        index = rows if order is None else order[rows]
        if len(shape) == 1:
            return self._numbers(own, raw, type_name).reshape(-1)[index]
        return self._numbers(own, raw.reshape(shape[0], -1)[index], type_name).reshape(-1, *shape[1:])

    def _numbers(self, own: str, raw: NDArray[np.uint8], type_name: str) -> Array:
        numbers: Array = raw.view(FLOATS[type_name]) if type_name in FLOATS else dequantised(raw, type_name)
        if self._gguf.architecture == "gemma3" and own.endswith("norm.weight"):
            # The file stores 1 + weight; transformers' module adds the 1 itself.
            return numbers.astype(np.float32) - 1
        return numbers

    def _order(self, own: str) -> NDArray[np.int64] | None:
        """Return the file's row index for each row of transformers' tensor; None if the orders are equal.

        llama.cpp interleaves the rotary rows of a head: its rows (0, 1, 2, 3, ...) are transformers' rows
        (0, n/2, 1, n/2 + 1, ...).
        """
        sizes: Any = self._config
        heads = {"attn_q": sizes.num_attention_heads, "attn_k": sizes.num_key_value_heads}
        part = own.split(".")[-2]
        if self._gguf.architecture != "llama" or part not in heads:
            return None
        return np.arange(self._gguf.shapes[own][0]).reshape(heads[part], -1, 2).swapaxes(1, 2).ravel()

    def panels(self, name: str) -> PanelWeights | None:
        """Repack a quantized matrix as panels; None for float tensors and types without a panel format."""
        own = self._own_names[name]
        return panels_of_blocks(self._gguf.raw(own), self._gguf.type_name(own), self._order(own))


def transformers_name(architecture: str, source: str) -> str:
    """Return the transformers name for the GGUF tensor `source`.

    Raises:
        UnsupportedModelError: the tensor has no counterpart in transformers.
    """
    stem, _, kind = source.rpartition(".")
    block = _GEMMA3_BLOCK if architecture == "gemma3" else _BLOCK
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if prefix == "blk" and part in block:
        return f"model.layers.{layer}.{block[part]}.{kind}"
    raise UnsupportedModelError(
        f"tensor {source!r:.80} of a {architecture!r:.80} GGUF file is not supported; "
        "use the model's safetensors folder or hub id instead"
    )


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters by name, for the architectures of GGUF files."""
    sizes: Any = config
    hidden, inner, head = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
    queries, keys = sizes.num_attention_heads * head, sizes.num_key_value_heads * head
    has_biases = bool(config.content.get("attention_bias"))
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if has_biases or config.model_type == "qwen2":
        layer |= {f"self_attn.{name}_proj.bias": layer[f"self_attn.{name}_proj.weight"][:1] for name in "qkv"}
    if has_biases:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.model_type in {"qwen3", "gemma3_text"}:
        layer |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (head,))
    if config.model_type == "gemma3_text":
        norms = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
        layer |= dict.fromkeys(norms, (hidden,))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (sizes.vocab_size, hidden)
    for index in range(sizes.num_hidden_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _check_shapes(path: Path, config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    wanted = parameter_shapes(config)
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise UnsupportedModelError(
            f"{path.name}: {len(wrong)} tensors do not match {config.model_type}, such as {name:.80}: "
            f"the shape is {found.get(name, 'none')} in the file and {wanted.get(name, 'none')} in the model"
            "; fetch a complete file, or use the model's safetensors folder or hub id instead"
        )
