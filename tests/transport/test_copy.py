"""`AsyncCPUTransfer`: copies that overlap with the device's work, buffer reuse, and errors.

The device is a fake whose copies end when a test says so; tests that need a GPU are marked `gpu`.
"""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from logprobe.errors import ParameterError
from logprobe.transport import AsyncCPUTransfer
from refusals import raises

LIMIT_S = 120  # generous, also for a busy machine
SOON_S = 0.05  # how long to check that something does not happen


class FarTensor(torch.Tensor):
    """A tensor that claims not to be on the host."""

    is_cpu = False


def far(values: Any) -> Any:
    return torch.as_tensor(values).as_subclass(FarTensor)


class Copy:
    """A copy that writes its target when the test releases it."""

    def __init__(self, tensor: torch.Tensor, target: torch.Tensor, log: list[str]) -> None:
        self.go = threading.Event()
        self._tensor, self._target, self._log = tensor, target, log

    def synchronize(self) -> None:
        assert self.go.wait(LIMIT_S)
        self._target.copy_(self._tensor)
        self._log.append("copied")


class SlowDevice:
    """A device whose copies start at once and end one by one."""

    def __init__(self, *, is_slow: bool = True) -> None:
        self.copies: list[Copy] = []
        self.log: list[str] = []
        self.num_allocated = 0
        self._is_slow = is_slow
        self._begun = threading.Condition()

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        self.num_allocated += 1
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def mark(self, tensor: torch.Tensor) -> Any:
        assert not tensor.is_cpu
        return "the work before"

    def copy(self, tensor: torch.Tensor, target: torch.Tensor, after: Any) -> Copy:
        assert after == "the work before"
        assert target.shape == tensor.shape
        copy = Copy(tensor, target, self.log)
        with self._begun:
            self.copies.append(copy)
            self._begun.notify_all()
        if not self._is_slow:
            copy.go.set()
        return copy

    def wait_for(self, num_begun: int) -> None:
        with self._begun:
            assert self._begun.wait_for(lambda: len(self.copies) >= num_begun, LIMIT_S)

    def finish(self) -> None:
        for copy in self.copies:
            copy.go.set()


def test_a_tensor_of_the_cpu_is_handed_over_as_a_view_that_keeps_it_alive() -> None:
    with AsyncCPUTransfer() as transfer:
        tensor = torch.arange(6.0).reshape(2, 3)
        future = transfer.submit_transfer(tensor, "a")
        assert future.done()
        view = transfer.get_result("a")
        assert view.data_ptr() == tensor.data_ptr()
        del tensor, future
        gc.collect()
        assert view.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_every_type_and_shape_comes_as_it_is(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    with AsyncCPUTransfer(device=SlowDevice(is_slow=False)) as transfer:
        transfer.submit_transfer(far(tensor), 1)
        result = transfer.get_result(1, LIMIT_S)
        assert (result.dtype, result.shape) == (dtype, tensor.shape)
        assert torch.equal(result, tensor)


def test_a_copy_runs_beside_the_next_step() -> None:
    """The submission returns while the copy is pending, and the copied numbers are correct."""
    device = SlowDevice()
    with AsyncCPUTransfer(device=device) as transfer:
        future = transfer.submit_transfer(far([1.0, 2.0]), "step 1")
        device.wait_for(1)
        device.log.append("step 2 has run")
        assert not future.done()
        device.finish()
        assert transfer.get_result("step 1", LIMIT_S).tolist() == [1, 2]
    assert device.log == ["step 2 has run", "copied"]


def test_two_copies_are_under_way_at_once_and_a_third_waits_for_a_buffer() -> None:
    device = SlowDevice()
    with AsyncCPUTransfer(num_buffers=2, max_workers=3, device=device) as transfer:
        for number in range(3):
            transfer.submit_transfer(far([number]), number)
        device.wait_for(2)
        device.finish()
        first, second = transfer.get_result(0, LIMIT_S), transfer.get_result(1, LIMIT_S)
        with pytest.raises(TimeoutError, match="transfer 2"):
            transfer.get_result(2, SOON_S)
        assert len(device.copies) == 2, "a buffer that is read was written to"
        assert {first.item(), second.item()} == {0, 1}
        del first
        device.wait_for(3)
        device.finish()
        assert transfer.get_result(2, LIMIT_S).tolist() == [2]
        assert second.tolist() == [1]


def test_buffers_go_to_transfers_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an awaited result could wait for a later one that nobody takes yet."""
    device, may_take = SlowDevice(), threading.Event()
    with AsyncCPUTransfer(num_buffers=2, max_workers=3, device=device) as transfer:
        take = transfer._take_buffer

        def late(*turn: threading.Event) -> Any:
            if threading.current_thread().name.endswith("_1"):  # the second transfer's
                assert may_take.wait(LIMIT_S)
            return take(*turn)

        monkeypatch.setattr(transfer, "_take_buffer", late)
        for number in range(3):
            transfer.submit_transfer(far([number]), number)
        device.wait_for(1)
        with pytest.raises(TimeoutError):
            transfer.get_result(2, SOON_S)
        may_take.set()
        device.wait_for(2)
        device.finish()
        assert [transfer.get_result(number, LIMIT_S).item() for number in range(2)] == [0, 1]
        device.wait_for(3)
        device.finish()


def test_a_part_of_a_result_keeps_its_buffer() -> None:
    device = SlowDevice(is_slow=False)
    with AsyncCPUTransfer(num_buffers=1, device=device) as transfer:
        transfer.submit_transfer(far(np.arange(12).reshape(3, 4)), "a")
        row = transfer.get_result("a", LIMIT_S).numpy()[1]
        transfer.submit_transfer(far(np.zeros((3, 4))), "b")
        with pytest.raises(TimeoutError, match="is an earlier result still held"):
            transfer.get_result("b", SOON_S)
        assert row.tolist() == [4, 5, 6, 7]
        del row
        assert not transfer.get_result("b", LIMIT_S).any()


def test_the_same_memory_is_used_again_and_grows_where_it_must() -> None:
    device = SlowDevice(is_slow=False)
    with AsyncCPUTransfer(num_buffers=1, device=device) as transfer:
        for number, size in enumerate([100, 100, 50, 100, 200, 10, 200]):
            transfer.submit_transfer(far(np.full(size, number)), number)
            assert transfer.get_result(number, LIMIT_S).tolist() == [number] * size
    assert device.num_allocated == 2


def test_many_threads_get_each_its_own_numbers() -> None:
    device = SlowDevice(is_slow=False)
    with AsyncCPUTransfer(device=device) as transfer, ThreadPoolExecutor(8) as pool:

        def work(thread: int) -> None:
            for number in range(50):
                name = (thread, number)
                transfer.submit_transfer(far([thread, number]), name)
                assert transfer.get_result(name, LIMIT_S).tolist() == [thread, number]

        list(pool.map(work, range(8)))
    assert device.num_allocated <= 2


def test_an_id_is_known_from_its_submission_until_its_result_is_taken() -> None:
    with AsyncCPUTransfer() as transfer:
        with pytest.raises(KeyError, match="no transfer 'a'"):
            transfer.get_result("a")
        transfer.submit_transfer(torch.zeros(1), "a")
        with pytest.raises(ValueError, match="transfer 'a' was already submitted"):
            transfer.submit_transfer(torch.zeros(1), "a")
        transfer.get_result("a")
        with pytest.raises(KeyError, match="no transfer 'a'"):
            transfer.get_result("a")
        transfer.submit_transfer(torch.ones(1), "a")
        assert transfer.get_result("a").item() == 1


def test_a_copy_that_fails_says_so_and_gives_its_buffer_back() -> None:
    class Broken(SlowDevice):
        def copy(self, tensor: torch.Tensor, target: torch.Tensor, after: Any) -> Copy:
            if tensor.numel() > 1:
                raise MemoryError("no room")
            return super().copy(tensor, target, after)

    with AsyncCPUTransfer(num_buffers=1, device=Broken(is_slow=False)) as transfer:
        transfer.submit_transfer(far([1, 2]), "bad")
        with pytest.raises(MemoryError, match="no room"):
            transfer.get_result("bad", LIMIT_S)
        transfer.submit_transfer(far([3]), "good")
        assert transfer.get_result("good", LIMIT_S).tolist() == [3]


def test_after_a_shutdown_nothing_is_taken_and_nothing_hangs() -> None:
    device = SlowDevice()
    transfer = AsyncCPUTransfer(num_buffers=1, max_workers=2, device=device)
    futures = [transfer.submit_transfer(far([number]), number) for number in range(4)]
    device.wait_for(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(transfer.get_result, 3)
        closing = threading.Thread(target=transfer.shutdown)
        closing.start()
        device.finish()
        closing.join(LIMIT_S)
        assert not closing.is_alive()
        with pytest.raises(RuntimeError, match="shut down"):
            waiting.result(LIMIT_S)
    begun = [future for future in futures if future.exception(LIMIT_S) is None]
    assert [future.result().numel() for future in begun] == [1] * len(device.copies)
    transfer.shutdown()
    with pytest.raises(RuntimeError, match="make a new AsyncCPUTransfer"):
        transfer.submit_transfer(torch.zeros(1), "late")
    with pytest.raises(RuntimeError, match="make a new AsyncCPUTransfer"):
        transfer.get_result(0)


@pytest.mark.parametrize("name", ["num_buffers", "max_workers"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        AsyncCPUTransfer(**{name: 0})


def test_another_device_is_refused() -> None:
    with AsyncCPUTransfer() as transfer, raises(ParameterError, parameter="tensor"):
        transfer.submit_transfer(torch.empty(2, device="meta"), "a")


@pytest.mark.gpu
class TestOnAGpu:
    """The same on a GPU: pinned memory, a separate stream, no result before its copy has ended."""

    def test_numbers_come_whole_through_pinned_memory(self) -> None:
        with AsyncCPUTransfer() as transfer:
            for number in range(20):
                tensor = torch.full((1 << 20,), number, device="cuda")
                transfer.submit_transfer(tensor * 2, number)
                result = transfer.get_result(number, LIMIT_S)
                assert result.is_pinned()
                assert bool((result == 2 * number).all())

    def test_a_copy_waits_for_the_work_before_it_and_not_for_what_follows(self) -> None:
        spin = 1 << 33  # clock cycles: an idle kernel of several seconds
        with AsyncCPUTransfer(num_buffers=1) as transfer:
            # Allocates the pinned memory, for which CUDA may wait until the GPU is idle.
            transfer.submit_transfer(torch.zeros(1 << 16, dtype=torch.int64, device="cuda"), "first")
            transfer.get_result("first", LIMIT_S)
            torch.cuda._sleep(1 << 20)
            tensor = torch.arange(1 << 16, device="cuda") * 3
            transfer.submit_transfer(tensor, "a")
            torch.cuda._sleep(spin)
            end = torch.cuda.Event()
            end.record()
            result = transfer.get_result("a", LIMIT_S)
            assert not end.query(), "the copy waited for the next step"
            assert torch.equal(result, torch.arange(1 << 16) * 3)
            torch.cuda.synchronize()

    def test_memory_that_is_freed_early_is_not_given_away_before_it_was_copied(self) -> None:
        with AsyncCPUTransfer(num_buffers=4, max_workers=4) as transfer:
            for number in range(50):
                transfer.submit_transfer(torch.full((1 << 18,), number, device="cuda"), number)
                torch.full((1 << 18,), -1, device="cuda")
                assert bool((transfer.get_result(number, LIMIT_S) == number).all())
