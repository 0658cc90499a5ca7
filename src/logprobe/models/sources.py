"""Read a model's weights one tensor at a time, from files or from a `state_dict`."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np

from logprobe.errors import UnsupportedModelError
from logprobe.kernels.arrays import Array, as_array
from logprobe.models.folder import shard_names
from logprobe.models.safetensors_files import tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import NDArray

    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models.safetensors_files import StoredTensor

Rows: TypeAlias = "slice | NDArray[np.integer[Any]]"
EVERY = slice(None)
T = TypeVar("T")


class Source(Protocol):
    """Interface for reading weights by name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors by name."""

    def read(self, name: str, rows: Rows = EVERY) -> Array:
        """Read rows of one tensor in its stored dtype, or as float32 if the tensor is quantized."""

    def panels(self, name: str) -> PanelWeights | None:
        """Return a quantized matrix as panels; None for float tensors and types without a panel format."""


class FolderSource:
    """The safetensors files in a folder; a tensor is mapped into memory only while it is in use."""

    def __init__(self, folder: Path) -> None:
        """Read the names and shapes of all tensors.

        Raises:
            UnsupportedModelError: a file cannot be read.
        """
        from safetensors import SafetensorError

        self._tensors: dict[str, StoredTensor] = {}
        for file in weight_files(folder):
            try:
                self._tensors |= tensors_of(file)[0]
            except (OSError, SafetensorError) as error:
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                raise UnsupportedModelError(f"{file}: cannot be read ({reason}); fetch it again") from error

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors by name."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str, rows: Rows = EVERY) -> Array:
        """Read rows of one tensor; the tensor stays mapped until the array is freed."""
        array = self._tensors[name].read()
        return array if rows is EVERY else array[rows]

    def panels(self, name: str) -> PanelWeights | None:
        """Return None: the tensors are floats."""


class StateSource:
    """A source of weights that are in memory, as arrays or torch tensors."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._state.items()}

    def read(self, name: str, rows: Rows = EVERY) -> Array:
        """Return rows of one tensor; a slice is a view, unless the tensor is on a GPU."""
        array = host_array(self._state[name])
        return array if rows is EVERY else array[rows]

    def panels(self, name: str) -> PanelWeights | None:
        """Return None: the tensors are floats."""


def host_array(values: Any) -> Array:
    """Return `values` as an array in main memory; a tensor on a GPU is copied, one on the CPU is not."""
    return values if isinstance(values, np.ndarray) else as_array(values.detach().cpu())


class RenamedSource:
    """A source with other names for its tensors; `names` maps each new name to the source's name."""

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        self._source, self._names = source, names

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors by name."""
        return {name: self._source.shapes[own] for name, own in self._names.items()}

    def read(self, name: str, rows: Rows = EVERY) -> Array:
        """Read rows of one tensor."""
        return self._source.read(self._names[name], rows)

    def panels(self, name: str) -> PanelWeights | None:
        """Return a quantized matrix as panels; see `Source.panels`."""
        return self._source.panels(self._names[name])


def made_ahead(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Run tasks on one thread per core and yield results in order, with one task per core running ahead."""
    num_threads = os.cpu_count() or 1
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for task in tasks:
            waiting.append(pool.submit(task))
            if len(waiting) > num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def weight_files(folder: Path) -> list[Path]:
    """List the weight files in a folder that transformers would load.

    Other files are skipped because some repositories contain the same weights again under other names. If
    transformers would find no file, all safetensors and GGUF files are listed.

    Raises:
        UnsupportedModelError: the index of the shards cannot be read.
    """
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    if (names := shard_names(folder)) is not None:
        return [folder / name for name in names]
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])


def weight_bytes(folder: Path) -> int:
    """Return the total size in bytes of the weight files in a folder."""
    return sum(file.stat().st_size for file in weight_files(folder))
