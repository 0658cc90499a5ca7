"""`AsyncCPUTransfer`: tensors of a device → the host, while the device goes on computing.

Before it: whoever computes on a device. After it: whoever reads on the host. A copy goes through one of a few
buffers of pinned memory, beside the device's own stream of work. A buffer is used again once nothing of what
was read from it is held any more, so a slow reader holds up later copies and never loses a number.
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import numpy as np
import torch

from logprobe.errors import require

if TYPE_CHECKING:
    from collections.abc import Hashable
    from types import TracebackType

    from numpy.typing import NDArray
    from torch import Tensor


Values = TypeVar("Values", "Tensor", "NDArray[Any]")


class CopyDevice(Protocol):
    """How a device's memory comes to the host beside its other work."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Memory of the host that the device writes to by itself, (num_bytes,) uint8."""

    def mark(self, tensor: Tensor) -> Any:
        """An event: all that this thread has asked of the tensor's device so far is done."""

    def copy(self, tensor: Tensor, target: Tensor, after: Any) -> Any:
        """Begin to copy after an event, and give the one that `target`, of the same shape, is whole.

        Its `synchronize()` waits for it.
        """


class CudaCopies:
    """`CopyDevice` of NVIDIA's GPUs: pinned memory, and one stream for the copies of each GPU."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cuda: Any = torch.cuda  # half of it has no types
        self._streams: dict[torch.device, Any] = {}

    def host_memory(self, num_bytes: int) -> Tensor:
        """Pinned memory, (num_bytes,) uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self, tensor: Tensor) -> Any:
        """The end of what the GPU's current stream holds."""
        return self._cuda.current_stream(tensor.device).record_event()

    def copy(self, tensor: Tensor, target: Tensor, after: Any) -> Any:
        """Copy in the stream of copies, which waits for `after` and for nothing else."""
        with self._lock:
            stream = self._streams.setdefault(tensor.device, self._cuda.Stream(tensor.device))
        with self._cuda.stream(stream):
            stream.wait_event(after)
            target.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)  # its memory is not given away before
            ready = self._cuda.Event(blocking=True)
            ready.record(stream)
        return ready


class _Lease:
    """The owner of an array over a buffer; the array and all its views hold on to it."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


class AsyncCPUTransfer:
    """Copies tensors to the host in the background, through `num_buffers` buffers.

    A tensor of the CPU, or an array of NumPy's, is not copied: its result is a view that keeps it alive. A
    tensor of a GPU must not be written to before its copy has ended. A result is the host's own; its buffer
    is used again once the result and all views of it are gone, and copies wait while no buffer is free.

    Args:
        num_buffers: results of a device that may be held at once.
        max_workers: threads that begin and await copies.
        device: how copies are made; None: NVIDIA's GPUs.

    Raises:
        ParameterError: fewer than one buffer or worker.
    """

    def __init__(
        self, num_buffers: int = 2, max_workers: int = 2, *, device: CopyDevice | None = None
    ) -> None:
        require(num_buffers >= 1, "num_buffers", f"must be at least 1, got {num_buffers}")
        require(max_workers >= 1, "max_workers", f"must be at least 1, got {max_workers}")
        self._device = device
        self._max_workers = max_workers
        self._pool = ThreadPoolExecutor(max_workers, thread_name_prefix="logprobe-copy")
        # Put back by a finalizer, which may run anywhere: this queue may be put to within itself.
        self._free: SimpleQueue[Tensor | None] = SimpleQueue()
        for _ in range(num_buffers):
            self._free.put(torch.empty(0, dtype=torch.uint8))
        self._lock = threading.Lock()
        # All below is guarded by `_lock`.
        self._transfers: dict[Hashable, Future[Any]] = {}
        self._is_closed = False
        self._latest = threading.Event()  # is set once the latest transfer has a buffer, or needs none
        self._latest.set()

    def submit_transfer(self, tensor: Values, transfer_id: Hashable) -> Future[Values]:
        """Begin to bring a tensor to the host; its result is for `get_result`, or the returned future.

        An array comes back as an array.

        Raises:
            ParameterError: the tensor lies on a device that nothing here copies from.
            RuntimeError: the transfers were shut down.
            ValueError: a transfer of this id is under way, or its result was not taken yet.
        """
        with self._lock:
            self._check_open()
            if transfer_id in self._transfers:
                raise ValueError(f"transfer {transfer_id!r} is under way; take its result first")
            future = self._begin(tensor)
            self._transfers[transfer_id] = future
        return future

    def get_result(self, transfer_id: Hashable, timeout: float | None = None) -> Any:
        """The tensor of a transfer on the host, once; waits for it, up to `timeout` seconds.

        Raises:
            KeyError: no such transfer, or its result was taken already.
            RuntimeError: the transfers were shut down.
            TimeoutError: it has not come in time; it may be asked for again.
        """
        with self._lock:
            self._check_open()
            if transfer_id not in self._transfers:
                raise KeyError(f"no transfer {transfer_id!r}, or its result was taken already")
            future = self._transfers[transfer_id]
        if not wait([future], timeout).done:
            raise TimeoutError(
                f"transfer {transfer_id!r} has not come within {timeout} s; is an earlier result still held?"
            )
        with self._lock:
            if self._transfers.get(transfer_id) is future:
                del self._transfers[transfer_id]
        return future.result()

    def shutdown(self) -> None:
        """End: copies that have begun are awaited, others fail with `RuntimeError`.

        Results that are held stay as they are. A second call does nothing.
        """
        with self._lock:
            self._is_closed = True
            self._transfers.clear()
        for _ in range(self._max_workers):
            self._free.put(None)
        self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the transfers were shut down; make a new AsyncCPUTransfer")

    def _begin(self, tensor: Any) -> Future[Any]:
        if isinstance(tensor, np.ndarray) or tensor.is_cpu:
            future: Future[Any] = Future()
            future.set_result(tensor.view() if isinstance(tensor, np.ndarray) else tensor.detach())
            return future
        if self._device is None:
            known = "cuda and cpu are copied from"
            require(tensor.is_cuda, "tensor", f"lies on {tensor.device}; {known}")
            self._device = CudaCopies()
        mark, before, own = self._device.mark(tensor), self._latest, threading.Event()
        future = self._pool.submit(self._copy, tensor.detach(), self._device, mark, (before, own))
        future.add_done_callback(lambda _: own.set())  # also where it was given up before it began
        self._latest = own
        return future

    def _take_buffer(self, before: threading.Event, own: threading.Event) -> Tensor | None:
        """A buffer, in the order of the transfers: none must wait for the result of a later one."""
        before.wait()
        try:
            return None if self._is_closed else self._free.get()
        finally:
            own.set()

    def _copy(
        self, tensor: Tensor, device: CopyDevice, after: Any, turn: tuple[threading.Event, threading.Event]
    ) -> Tensor:
        buffer = self._take_buffer(*turn)
        if buffer is None:
            raise RuntimeError("the transfers were shut down before this one began")
        num_bytes = tensor.numel() * tensor.element_size()
        try:
            if buffer.numel() < num_bytes:
                # Rounded up: to get pinned memory may wait until the GPU is idle.
                buffer = device.host_memory(1 << (num_bytes - 1).bit_length())
            memory = buffer[:num_bytes]
            device.copy(tensor, memory.view(tensor.dtype).view(tensor.shape), after).synchronize()
        except BaseException:
            self._free.put(buffer)
            raise
        lease = _Lease(memory.numpy())
        weakref.finalize(lease, self._free.put, buffer).atexit = False
        return torch.from_numpy(np.asarray(lease)).view(tensor.dtype).view(tensor.shape)
