"""GGUF tensors → one safetensors file of float32, one tensor in memory at a time.

The names and shapes are checked against transformers' own module before anything is written, so a tensor that
has no place there, or a place that gets no tensor, is an error and never a random weight.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

    from logprobe.models.gguf.file import GgufFile

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
_ALIGNMENT_BYTES: Final = 8


def write_weights(gguf: GgufFile, config: PreTrainedConfig, path: Path) -> None:
    """Write every tensor of the file under its transformers name.

    Layout: 8 bytes of header length, a JSON header, the data
    (https://huggingface.co/docs/safetensors/index#format).

    Raises:
        UnsupportedModelError: the file's tensors are not exactly the model's.
        OSError: the file cannot be written.
    """
    names = {source: transformers_name(gguf.architecture, source) for source in gguf.shapes}
    _check_against_module(gguf, config, names)
    with path.open("wb") as file:
        header = _header({names[source]: shape for source, shape in gguf.shapes.items()})
        file.write(len(header).to_bytes(_ALIGNMENT_BYTES, "little"))
        file.write(header)
        for source in _with_progress(gguf):
            file.write(read_weight(gguf, config, source).data)
        file.flush()
        # The entry's name appears right after this: its bytes must not be younger than its name.
        os.fsync(file.fileno())


def read_weight(
    gguf: GgufFile, config: PreTrainedConfig, source: str
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Dequantise one tensor and give it the order of rows, and the offset, that transformers expects."""
    weight: np.ndarray[Any, np.dtype[np.float32]] = in_order(gguf, config, source, gguf.tensor(source))
    if gguf.architecture == "gemma3" and source.endswith("norm.weight"):
        # The file holds what the norm multiplies by; the module adds the one itself.
        return weight - np.float32(1)
    return weight


def in_order(
    gguf: GgufFile, config: PreTrainedConfig, source: str, rows: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Bring a tensor's rows, of whatever form, into the order that transformers expects."""
    if gguf.architecture == "llama" and ".attn_q." in source:
        return _halves_apart(rows, config.num_attention_heads)
    if gguf.architecture == "llama" and ".attn_k." in source:
        return _halves_apart(rows, config.num_key_value_heads)
    return rows


def _halves_apart(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo llama.cpp's pairing of rotary rows: (0, n/2, 1, n/2+1, ...) of a head becomes (0, 1, 2, ...)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def transformers_name(architecture: str, source: str) -> str:
    """The name under which transformers knows a tensor of a GGUF file.

    Raises:
        UnsupportedModelError: it knows none.
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
        f"tensor {source!r} of a {architecture!r} GGUF file is not converted; "
        "use the model's safetensors folder or hub id instead"
    )


def _check_against_module(gguf: GgufFile, config: PreTrainedConfig, names: dict[str, str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()  # type: ignore[no-untyped-call]
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
    found = {names[source]: shape for source, shape in gguf.shapes.items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise UnsupportedModelError(
            f"{gguf.path.name}: {len(wrong)} tensors do not fit {config.model_type}, first {name}: "
            f"the file has {found.get(name, 'none')}, the model {wanted.get(name, 'none')}"
        )


def _header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(np.prod(shape))
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % _ALIGNMENT_BYTES)


def _with_progress(gguf: GgufFile) -> Any:
    from rich.console import Console
    from rich.progress import track

    return track(gguf.shapes, description="converting to float32", console=Console(stderr=True))
