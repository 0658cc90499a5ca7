"""One loop of the native library, ready to run, and how loops are cut for its threads.

Before it: the kernels' checked arguments. After it: the native library's threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from logprobe.kernels import hooks
from logprobe.kernels.native import library

if TYPE_CHECKING:
    from logprobe.kernels.native import Work

OMP_PAUSE_HARD = 2  # OpenMP 5.0, 3.6
THREAD_ITEMS = 4  # of a loop for each, where it can be cut so finely: all end at nearly the same time


@dataclass(frozen=True, slots=True)
class Stage:
    """A kernel with its arguments, and the memory behind their addresses."""

    kernel: str
    work: Work
    keeps: tuple[Any, ...]
    is_small: bool = False  # starting the threads for it alone would cost more than they save

    def run(self, *, num_threads: int | None = None) -> None:
        """Run it until each item is done, each exactly once; releases the GIL."""
        threads = torch.get_num_threads() if num_threads is None else num_threads
        library().run(self.kernel, self.work, 1 if self.is_small else threads)


def items_for_threads() -> int:
    """How many items a loop is worth being cut into: several a thread, where there are several threads."""
    num_threads = torch.get_num_threads()
    return THREAD_ITEMS * num_threads if num_threads > 1 else 1


def block_rows(num_rows: int, most: int) -> int:
    """Rows of an item of a loop whose rows take equally long: at most so many, and some for every thread."""
    return max(1, min(most, num_rows // torch.get_num_threads()))


def address(tensor: Any) -> int | None:
    """The address of a tensor's numbers; None where there is none."""
    return None if tensor is None else tensor.data_ptr()


def release_threads() -> None:
    """End the calling thread's OpenMP threads; torch's next parallel operator starts them anew.

    They spin for a while after each operator, beside the threads of the native library.
    """
    pause = hooks.PAUSE.find()
    if pause is not None:
        pause(OMP_PAUSE_HARD)
