"""A model's weights where they lie, read one tensor at a time; nothing of them is held.

Before it: the folder of a model, or a `state_dict`. After it: panels, and transformers' module (`lazy`).
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from logprobe.errors import UnsupportedModelError
from logprobe.models.folder import shard_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    import torch

    from logprobe.kernels.layers.forms import PanelWeights

Rows: TypeAlias = "slice | torch.Tensor"
EVERY = slice(None)
T = TypeVar("T")


class Source(Protocol):
    """Weights by name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What there is."""

    def read(self, name: str, rows: Rows = EVERY) -> torch.Tensor:
        """Some rows of one tensor, of the dtype in which it lies; float32 where it lies in blocks."""

    def panels(self, name: str) -> PanelWeights | None:
        """A matrix that lies in blocks, as panels of those; None where it lies in floats."""


class FolderSource:
    """The safetensors files of a folder, mapped while a tensor of them is in use."""

    def __init__(self, folder: Path) -> None:
        """Read the names.

        Raises:
            UnsupportedModelError: a file cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in weight_files(folder):
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118
                        self._files[name] = file
                        self._shapes[name] = tuple(opened.get_slice(name).get_shape())
            except (OSError, SafetensorError) as error:
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                raise UnsupportedModelError(f"{file}: cannot be read ({reason}); fetch it again") from error

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What there is."""
        return self._shapes

    def read(self, name: str, rows: Rows = EVERY) -> torch.Tensor:
        """Some rows of one tensor, on the file's own pages: they go with it."""
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor if rows is EVERY else tensor[rows]

    def panels(self, name: str) -> PanelWeights | None:
        """None: floats."""


class StateSource:
    """Weights that are in memory."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What there is."""
        return {name: tuple(tensor.shape) for name, tensor in self._state.items()}

    def read(self, name: str, rows: Rows = EVERY) -> torch.Tensor:
        """Some rows of one tensor; no copy."""
        tensor = self._state[name]
        return tensor if rows is EVERY else tensor[rows]

    def panels(self, name: str) -> PanelWeights | None:
        """None: floats."""


class RenamedSource:
    """A source by other names."""

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        self._source, self._names = source, names

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What there is."""
        return {name: self._source.shapes[own] for name, own in self._names.items()}

    def read(self, name: str, rows: Rows = EVERY) -> torch.Tensor:
        """Some rows of one tensor."""
        return self._source.read(self._names[name], rows)

    def panels(self, name: str) -> PanelWeights | None:
        """A matrix that lies in blocks, as panels of those."""
        return self._source.panels(self._names[name])


def made_ahead(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """What each task gives, in their order, done on all cores, as many ahead of who takes them."""
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
    """The files of a folder's weights: of those that transformers writes, or else all safetensors.

    Some repositories hold the same weights twice, in files of another program's names beside these.

    Raises:
        UnsupportedModelError: the index of its shards cannot be read.
    """
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    if (names := shard_names(folder)) is not None:
        return [folder / name for name in names]
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])


def weight_bytes(folder: Path) -> int:
    """What the files of a model's weights take."""
    return sum(file.stat().st_size for file in weight_files(folder))
