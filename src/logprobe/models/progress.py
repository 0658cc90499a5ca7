"""How far a first load is: one bar on the terminal, of the model's bytes each time that they are read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Self

from logprobe.models.cache import say
from logprobe.models.sources import EVERY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models.sources import Rows, Source

MIN_BYTES: Final = 1 << 28  # of a model that is worth a bar


class LoadProgress:
    """The bar of a load that reads all weights several times; of a small model there is none."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._bar: Any = None
        self._task: Any = None
        self._scale = 1.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, source: Source, num_bytes: int, num_times: int) -> None:
        """Show a bar for weights of so many bytes, or say on what is no terminal that it takes a while."""
        if num_bytes < MIN_BYTES:
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if not console.is_terminal:
            say(f"{self._name}: a first load packs and proves {num_bytes / 1e9:.1f} GB; later ones do not")
            return
        num_weights = sum(map(math.prod, source.shapes.values()))
        self._scale = num_bytes / num_weights
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task(f"{self._name}: reading", total=num_times * num_bytes)
        self._bar.start()

    def say(self, what: str) -> None:
        """What is done from here on: `packing`, `proving`."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._name}: {what}")

    def advance(self, num_weights: int) -> None:
        """So many weights have been read."""
        if self._bar is not None:
            self._bar.advance(self._task, num_weights * self._scale)


class CountedSource:
    """A source whose reading is told to a bar."""

    def __init__(self, source: Source, progress: LoadProgress) -> None:
        self._source, self._progress = source, progress

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What there is."""
        return self._source.shapes

    def read(self, name: str, rows: Rows = EVERY) -> Tensor:
        """Some rows of one tensor."""
        tensor = self._source.read(name, rows)
        self._progress.advance(tensor.numel())
        return tensor

    def panels(self, name: str) -> PanelWeights | None:
        """A matrix that lies in blocks, as panels of those."""
        panels = self._source.panels(name)
        if panels is not None:
            self._progress.advance(panels.num_outputs * panels.num_inputs)
        return panels
