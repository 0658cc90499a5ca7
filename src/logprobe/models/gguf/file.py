"""Metadata and memory-mapped tensors of a GGUF file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. `config`, `weights` and `tokenizer` read
GGUF files through `GgufFile`.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.errors import UnsupportedModelError
from logprobe.models.gguf.header import read_header

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

CHUNK_NUMBERS: Final = 1 << 19  # weights dequantized at a time, so that they fit in the CPU cache
# tensor with factors for the rotary frequencies, which is not a weight
ROPE_FACTORS: Final = "rope_freqs.weight"
NO_TOKEN: Final = (-1, 2**32 - 1)  # written by some tools for a special token that the model lacks
FLOATS: Final = ("F64", "F32", "F16", "BF16")
_MISSING: Final = object()


class GgufFile:
    """A GGUF file. In methods, a key that begins with a dot is prefixed with the architecture's name.

    Raises:
        InputError: the file is not a GGUF file, or is truncated.
        UnsupportedModelError: the file does not name its architecture.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        architecture = header.keys.get("general.architecture")
        if not isinstance(architecture, str):
            raise UnsupportedModelError(
                f"{path.name}: the key 'general.architecture' is missing; fetch a complete file"
            )
        self.architecture = architecture
        self._keys, self._tensors = header.keys, header.tensors

    def value(self, key: str, default: Any = _MISSING) -> Any:
        """Return one metadata value as a Python number, string or list.

        Raises:
            UnsupportedModelError: the file lacks the key and no default was given.
        """
        found = self._keys.get(self._full(key), default)
        if found is _MISSING:
            raise UnsupportedModelError(
                f"{self.path.name}: the key {self._full(key)!r} is missing; fetch a complete file"
            )
        return found

    def token_id(self, name: str) -> int | None:
        """Return the id of the special token `name`, such as `bos`; None if the file has no such token.

        For the padding and unknown tokens, which affect no score, the ids -1 and 2**32 - 1 also mean that
        there is no such token.

        Raises:
            UnsupportedModelError: the id is outside the file's vocabulary.
        """
        key = f"tokenizer.ggml.{name}_token_id"
        found, size = self.value(key, None), len(self.value("tokenizer.ggml.tokens"))
        if found in NO_TOKEN and name in ("padding", "unknown"):
            return None
        if found is not None and (type(found) is not int or not 0 <= found < size):
            raise UnsupportedModelError(
                f"{self.path.name}: {key} is {found!r:.80}, which is not a token id below {size}; "
                "fetch the file again"
            )
        return found

    def own_keys(self) -> set[str]:
        """Return the keys that begin with the architecture's name, without this name but with the dot."""
        prefix = f"{self.architecture}."
        return {"." + key.removeprefix(prefix) for key in self._keys if key.startswith(prefix)}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors by name, outermost dimension first; tensors are in the file's order."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    @property
    def quantization(self) -> str | None:
        """The file's quantization as llama.cpp names it, such as `Q4_K_M`; None for float weights.

        If the file has no `general.file_type`, the value is the tensor type with the most bytes in the file.
        """
        from gguf import LlamaFileType

        kinds = {kind.value: kind.name for kind in LlamaFileType if kind is not LlamaFileType.GUESSED}
        kind = self.value("general.file_type", None)
        name = kinds.get(kind) if isinstance(kind, int) else None
        if name is None:
            sizes = Counter[str]()
            for tensor in self._tensors.values():
                sizes[tensor.type_name] += tensor.num_bytes
            name = max(sizes, key=sizes.__getitem__, default="F32")
        name = name.removeprefix("MOSTLY_").removeprefix("ALL_")
        return None if name in FLOATS else name

    def type_name(self, name: str) -> str:
        """Return a tensor's data type: `F32`, or a quantization type such as `Q4_1`."""
        return self._tensors[name].type_name

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Map one tensor into memory as (rows, bytes per row); all dimensions but the innermost become rows.

        The mapping is closed when the array is freed.
        """
        tensor = self._tensors[name]
        data = np.memmap(self.path, np.uint8, "c", tensor.start, tensor.num_bytes)  # copy-on-write
        return np.asarray(data).reshape(int(np.prod(tensor.shape[:-1])), -1)

    def _full(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key


def dequantised(raw: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    """Dequantize rows as stored in the file, (rows, bytes per row), to (rows, values per row) float32."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[type_name]
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    numbers = np.empty((len(raw), raw.shape[1] // block_bytes * block_len), np.float32)
    step = max(1, CHUNK_NUMBERS // numbers.shape[1])
    for start in range(0, len(raw), step):
        # Passed as a single row, because `dequantize` processes only sixteen rows at a time.
        piece = raw[start : start + step].reshape(1, -1)
        numbers[start : start + step] = dequantize(piece, kind).reshape(-1, numbers.shape[1])
    return numbers
