"""`AsyncCPUTransfer`: copy tensors from a device to the host while the device keeps computing.

Copies run on a separate stream into a small pool of pinned buffers. A buffer is reused only when no view of
its last result is left, so that a slow reader delays later copies but never sees its data overwritten.
"""

from __future__ import annotations

import weakref
from concurrent.futures import wait
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

import numpy as np

from logprobe import runtime
from logprobe.errors import require

if TYPE_CHECKING:
    from collections.abc import Hashable
    from concurrent.futures import Future
    from types import TracebackType

    import torch
    from numpy.typing import NDArray
    from torch import Tensor


Values = TypeVar("Values", "Tensor", "NDArray[Any]")
_UNALLOCATED: Final = object()


class CopyDevice(Protocol):
    """Interface for asynchronous copies from a device to the host."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Allocate host memory that the device can write to directly, (num_bytes,) uint8."""

    def mark(self, tensor: Tensor) -> Any:
        """Record and return an event after the work that this thread has queued on the tensor's device."""

    def copy(self, tensor: Tensor, target: Tensor, after: Any) -> Any:
        """Start copying `tensor` to `target`, which has the same shape, after the event `after`.

        Return an event whose `synchronize()` waits for the copy.
        """


class CudaCopies:
    """`CopyDevice` for NVIDIA GPUs: pinned memory, and one copy stream per GPU."""

    def __init__(self) -> None:
        import torch

        self._lock = runtime.Lock()
        self._cuda: Any = torch.cuda  # torch.cuda is only partly typed
        self._streams: dict[torch.device, Any] = {}

    def host_memory(self, num_bytes: int) -> Tensor:
        """Allocate pinned memory, (num_bytes,) uint8."""
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self, tensor: Tensor) -> Any:
        """Record an event on the GPU's current stream."""
        return self._cuda.current_stream(tensor.device).record_event()

    def copy(self, tensor: Tensor, target: Tensor, after: Any) -> Any:
        """Start the copy on the copy stream, which waits only for `after`."""
        with self._lock:
            stream = self._streams.setdefault(tensor.device, self._cuda.Stream(tensor.device))
        with self._cuda.stream(stream):
            stream.wait_event(after)
            target.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)  # keeps the tensor's memory from being reused before the copy ends
            ready = self._cuda.Event(blocking=True)
            ready.record(stream)
        return ready


class _Lease:
    """Base object of an array over a buffer; it lives as long as the array or any view of the array."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


class AsyncCPUTransfer:
    """Copies tensors to the host in the background, through a pool of pinned buffers.

    CPU tensors and NumPy arrays are not copied: the result is a view. A GPU tensor must not be modified until
    its copy has ended. A buffer is reused when its result and all views of the result are gone; copies wait
    while no buffer is free.

    Args:
        num_buffers: maximum number of results from a device that can exist at once.
        max_workers: number of threads that start copies and wait for them.
        device: copy implementation; None for `CudaCopies`.

    Raises:
        ParameterError: `num_buffers` or `max_workers` is less than 1.
    """

    def __init__(
        self, num_buffers: int = 2, max_workers: int = 2, *, device: CopyDevice | None = None
    ) -> None:
        require(num_buffers >= 1, "num_buffers", f"must be at least 1, got {num_buffers}")
        require(max_workers >= 1, "max_workers", f"must be at least 1, got {max_workers}")
        self._device = device
        self._max_workers = max_workers
        self._pool = runtime.ThreadPoolExecutor(max_workers, thread_name_prefix="logprobe-copy")
        # A finalizer, which may run inside any call, returns buffers; SimpleQueue.put is reentrant.
        # In the queue, _UNALLOCATED stands for a buffer that is allocated when it is first used.
        self._free: SimpleQueue[Any] = SimpleQueue()
        for _ in range(num_buffers):
            self._free.put(_UNALLOCATED)
        self._lock = runtime.Lock()
        # Everything below is guarded by `_lock`.
        self._transfers: dict[Hashable, Future[Any]] = {}
        self._is_closed = False
        self._latest = runtime.Event()  # set once the latest transfer has a buffer, or needs none
        self._latest.set()

    def submit_transfer(self, tensor: Values, transfer_id: Hashable) -> Future[Values]:
        """Start copying a tensor to the host; get the result with `get_result` or from the returned future.

        A NumPy array is returned as a NumPy array.

        Raises:
            ParameterError: the tensor's device is not supported.
            RuntimeError: `shutdown` was called.
            ValueError: a transfer with this id is running, or its result was not fetched yet.
        """
        with self._lock:
            self._check_open()
            if transfer_id in self._transfers:
                raise ValueError(f"transfer {transfer_id!r} was already submitted; take its result first")
            future = self._begin(tensor)
            self._transfers[transfer_id] = future
        return future

    def get_result(self, transfer_id: Hashable, timeout: float | None = None) -> Any:
        """Wait up to `timeout` seconds for a transfer, and return its result, which can be fetched only once.

        Raises:
            KeyError: there is no such transfer, or its result was fetched already.
            RuntimeError: `shutdown` was called.
            TimeoutError: the transfer is not done in time; call again later.
        """
        with self._lock:
            self._check_open()
            if transfer_id not in self._transfers:
                raise KeyError(f"no transfer {transfer_id!r}, or its result was taken already")
            future = self._transfers[transfer_id]
        if not wait([future], timeout).done:
            raise TimeoutError(
                f"transfer {transfer_id!r} has not finished in {timeout} s; is an earlier result still held?"
            )
        with self._lock:
            if self._transfers.get(transfer_id) is future:
                del self._transfers[transfer_id]
        return future.result()

    def shutdown(self) -> None:
        """Wait for running copies and fail the others with `RuntimeError`. May be called more than once.

        Results that were returned stay valid.
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
            future: Future[Any] = runtime.Future()
            future.set_result(tensor.view() if isinstance(tensor, np.ndarray) else tensor.detach())
            return future
        if self._device is None:
            known = "cuda and cpu are supported"
            require(tensor.is_cuda, "tensor", f"is on {tensor.device}; {known}")
            self._device = CudaCopies()
        mark, before, own = self._device.mark(tensor), self._latest, runtime.Event()
        future = self._pool.submit(self._copy, tensor.detach(), self._device, mark, (before, own))
        # runs even if the transfer is cancelled before it starts
        future.add_done_callback(lambda _: own.set())
        self._latest = own
        return future

    def _take_buffer(self, before: runtime.Event, own: runtime.Event) -> Any:
        """Wait for `before`, take a buffer from the queue, then set `own`; return None after `shutdown`.

        Transfers take buffers in order, so that no transfer waits until the result of a later one is
        released.
        """
        before.wait()
        try:
            return None if self._is_closed else self._free.get()
        finally:
            own.set()

    def _copy(
        self, tensor: Tensor, device: CopyDevice, after: Any, turn: tuple[runtime.Event, runtime.Event]
    ) -> Tensor:
        import torch

        buffer = self._take_buffer(*turn)
        if buffer is None:
            raise RuntimeError("the transfers were shut down before this one began")
        num_bytes = tensor.numel() * tensor.element_size()
        try:
            if buffer is _UNALLOCATED or buffer.numel() < num_bytes:
                # Round up so as to allocate rarely, since allocating pinned memory may wait until the GPU
                # is idle.
                buffer = device.host_memory(1 << (num_bytes - 1).bit_length())
            memory = buffer[:num_bytes]
            device.copy(tensor, memory.view(tensor.dtype).view(tensor.shape), after).synchronize()
        except BaseException:
            self._free.put(buffer)
            raise
        lease = _Lease(memory.numpy())
        weakref.finalize(lease, self._free.put, buffer).atexit = False
        return torch.from_numpy(np.asarray(lease)).view(tensor.dtype).view(tensor.shape)
