"""Progress bar for a model's first load, which reads all weights several times."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Self

from logprobe.models.cache import in_words, say
from logprobe.models.sources import EVERY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logprobe.kernels.arrays import Array
    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models.sources import Rows, Source

MIN_BYTES: Final = 1 << 26  # smallest model that gets a progress bar


class LoadProgress:
    """A progress bar on standard error, shown for models of at least `MIN_BYTES`."""

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
        """Show the bar; if standard error is not a terminal, print one line instead.

        Args:
            source: the weights that will be read.
            num_bytes: size of the weights on disk.
            num_times: number of times that the load reads all weights.
        """
        if num_bytes < MIN_BYTES:
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if not console.is_terminal:
            say(f"{self._name}: first load, packing and verifying {in_words(num_bytes)}")
            return
        num_weights = sum(map(math.prod, source.shapes.values()))
        self._scale = num_bytes / num_weights
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task(f"{self._name}: reading", total=num_times * num_bytes)
        self._bar.start()

    def say(self, what: str) -> None:
        """Set the bar's description, for example `packing`."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._name}: {what}")

    def advance(self, num_weights: int) -> None:
        """Advance the bar by a number of weights that have been read."""
        if self._bar is not None:
            self._bar.advance(self._task, num_weights * self._scale)


class CountedSource:
    """A source that advances a progress bar as weights are read from it."""

    def __init__(self, source: Source, progress: LoadProgress) -> None:
        self._source, self._progress = source, progress

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors by name."""
        return self._source.shapes

    def read(self, name: str, rows: Rows = EVERY) -> Array:
        """Read rows of one tensor."""
        array = self._source.read(name, rows)
        self._progress.advance(array.size)
        return array

    def panels(self, name: str) -> PanelWeights | None:
        """Return a quantized matrix as panels; see `Source.panels`."""
        panels = self._source.panels(name)
        if panels is not None:
            self._progress.advance(panels.num_outputs * panels.num_inputs)
        return panels
