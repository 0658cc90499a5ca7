"""What a GGUF file says of itself: typed look-ups of its metadata, and its tensors where they lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. `config`, `weights` and `tokenizer` read
through this.
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

CHUNK_NUMBERS: Final = 1 << 19  # that are dequantised together: what is made on the way stays in a cache
ROPE_FACTORS: Final = "rope_freqs.weight"  # of frequencies: no weight of the model's
NO_TOKEN: Final = (-1, 2**32 - 1)  # as tools write the id of a special token that a model lacks
FLOATS: Final = ("F64", "F32", "F16", "BF16")
_MISSING: Final = object()


class GgufFile:
    """A GGUF file; keys that begin with a dot are the architecture's own.

    Raises:
        InputError: the file is no GGUF file, or is cut off.
        UnsupportedModelError: it does not name its architecture.
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
        """Give one metadata value as Python numbers, strings and lists.

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
        """Return the id of a special token, such as `bos`; None if the file has none.

        Tools write -1 or 2**32 - 1 where a model has no padding or unknown token, which change no score.

        Raises:
            UnsupportedModelError: it is no id of the file's vocabulary.
        """
        key = f"tokenizer.ggml.{name}_token_id"
        found, size = self.value(key, None), len(self.value("tokenizer.ggml.tokens"))
        if found in NO_TOKEN and name in ("padding", "unknown"):
            return None
        if found is not None and (type(found) is not int or not 0 <= found < size):
            raise UnsupportedModelError(
                f"{self.path.name}: {key} is {found!r:.80}; the vocabulary has {size} tokens"
            )
        return found

    def own_keys(self) -> set[str]:
        """List the architecture's own keys, each with its leading dot."""
        prefix = f"{self.architecture}."
        return {"." + key.removeprefix(prefix) for key in self._keys if key.startswith(prefix)}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors' names and shapes, outermost dimension first, in the file's order."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    @property
    def quantization(self) -> str | None:
        """The file's quantisation by llama.cpp's name, such as `Q4_K_M`; None for float weights.

        A file that does not say it has that of most of its bytes.
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
        """Of a tensor's numbers: `F32`, or that of a quantisation, for example `Q4_1`."""
        return self._tensors[name].type_name

    def raw(self, name: str) -> NDArray[np.uint8]:
        """One tensor's rows on the file's own pages, (rows, bytes): all but its innermost dimension are rows.

        The pages go with the array.
        """
        tensor = self._tensors[name]
        data = np.memmap(
            self.path, np.uint8, "c", tensor.start, tensor.num_bytes
        )  # what is written stays here
        return np.asarray(data).reshape(int(np.prod(tensor.shape[:-1])), -1)

    def _full(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key


def dequantised(raw: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    """Rows as they stand in a file, (rows, bytes), as float32."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[type_name]
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    numbers = np.empty((len(raw), raw.shape[1] // block_bytes * block_len), np.float32)
    step = max(1, CHUNK_NUMBERS // numbers.shape[1])
    for start in range(0, len(raw), step):
        # As one row: the library takes sixteen at a time.
        piece = raw[start : start + step].reshape(1, -1)
        numbers[start : start + step] = dequantize(piece, kind).reshape(-1, numbers.shape[1])
    return numbers
