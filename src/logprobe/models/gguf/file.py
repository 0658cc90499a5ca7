"""What a GGUF file says of itself: typed look-ups of its metadata, and its tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. `gguf_config`, `gguf_weights`
and `gguf_tokenizer` read through this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.errors import InputError, UnsupportedModelError
from logprobe.models.gguf.header import check_header

if TYPE_CHECKING:
    from pathlib import Path

_MISSING: Final = object()


class GgufFile:
    """An open GGUF file; keys that begin with a dot are the architecture's own.

    Raises:
        InputError: the file is no GGUF file, or is cut off.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        check_header(path)
        try:
            self._reader = GGUFReader(path)
            self.architecture = str(self.value("general.architecture"))
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise InputError(f"{path}: not a readable GGUF file ({error}); fetch it again") from error
        self._shapes = {
            tensor.name: tuple(int(n) for n in tensor.shape[::-1]) for tensor in self._reader.tensors
        }

    def value(self, key: str, default: Any = _MISSING) -> Any:
        """Give one metadata value as Python numbers, strings and lists.

        Raises:
            UnsupportedModelError: the file lacks the key and no default was given.
        """
        field = self._reader.fields.get(self._full(key))
        if field is not None:
            return field.contents()
        if default is _MISSING:
            raise UnsupportedModelError(
                f"{self.path.name}: the key {self._full(key)!r} is missing; fetch a complete file"
            )
        return default

    def own_keys(self) -> set[str]:
        """List the architecture's own keys, each with its leading dot."""
        prefix = f"{self.architecture}."
        return {"." + key.removeprefix(prefix) for key in self._reader.fields if key.startswith(prefix)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors' names and shapes, outermost dimension first, in the file's order."""
        return self._shapes

    def tensor(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Dequantise one tensor: float32, outermost dimension first."""
        from gguf.quants import dequantize

        found = next(tensor for tensor in self._reader.tensors if tensor.name == name)
        return np.ascontiguousarray(dequantize(found.data, found.tensor_type), dtype=np.float32)

    def raw(self, name: str) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], str]:
        """One tensor's rows as they stand in the file, (rows, bytes), and the name of their type."""
        found = next(tensor for tensor in self._reader.tensors if tensor.name == name)
        rows = np.asarray(found.data).reshape(self._shapes[name][0], -1)
        return rows.view(np.uint8), found.tensor_type.name

    def _full(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key
