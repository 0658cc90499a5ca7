"""The engine on a device other than the CPU: data is read only through explicit copies.

The device is a fake: its tensors compute like CPU tensors, but refuse implicit reads on the host and
operations that mix them with host tensors. This keeps the GPU path working on machines without a GPU.
The numbers must be those of the plain engine.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from logprobe.engine.engine import Engine
from logprobe.engine.overlap import OverlappedLoop
from logprobe.errors import ConflictingParametersError
from logprobe.processors import LogitsProcessor
from logprobe.transport import AsyncCPUTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 120  # generous, also for a busy machine
PROMPT = [0, 40, 41, 42, 43, 44, 40, 41]
DEVICE = torch.device("privateuseone", 0)  # torch's name for out-of-tree devices
HOST = torch.device("cpu")
READS = {
    torch.Tensor.__array__,
    torch.Tensor.__bool__,
    torch.Tensor.__complex__,
    torch.Tensor.__contains__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__float__,
    torch.Tensor.__format__,
    torch.Tensor.__index__,
    torch.Tensor.__int__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.allclose,
    torch.Tensor.data_ptr,
    torch.Tensor.equal,
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.allclose,
    torch.equal,
    torch.is_nonzero,
}
TAKES_HOST_INDICES = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
COPIES = {torch.Tensor.copy_}
OF_DEVICE = {
    torch.Tensor.device.__get__: DEVICE,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
}


class HostReadError(AssertionError):
    """Device data was read, or mixed with host data, without an explicit copy."""


class DeviceTensor(torch.Tensor):
    """A tensor on the fake device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in OF_DEVICE:
            return OF_DEVICE[func]
        if func in READS or (func is torch.Tensor.numpy and not kwargs.get("force")):
            raise HostReadError(f"{func.__name__} reads a device tensor on the host")
        is_move = func is torch.Tensor.to and any(isinstance(value, torch.Tensor) for value in args[1:])
        if func not in COPIES and not is_move:
            refuse_mixture(func, args[:1] if func in TAKES_HOST_INDICES else (args, kwargs))
        is_copy = (
            func in {torch.Tensor.cpu, torch.Tensor.numpy}
            or names(func, args, kwargs, HOST)
            or (is_move and not isinstance(args[1], DeviceTensor))
        )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*on_host(args), **on_host(kwargs))
        return result if is_copy else on_device(result)


class Device(TorchFunctionMode):
    """Let torch create tensors on the fake device and move them there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not names(func, args, kwargs, DEVICE):
            return func(*args, **kwargs)
        if "pin_memory" in kwargs:
            raise HostReadError("only the host's memory can be pinned")
        args, kwargs = moved(args), {name: moved(value) for name, value in kwargs.items()}
        with torch._C.DisableTorchFunctionSubclass():
            return on_device(func(*on_host(args), **on_host(kwargs)))


def names(func: Any, args: Any, kwargs: Any, device: torch.device) -> bool:
    """Return True if a call creates a tensor on a device or moves one there."""
    asked = [kwargs.get("device"), *(args[1:] if func is torch.Tensor.to else ())]
    return any(
        isinstance(value, torch.device | str) and torch.device(value).type == device.type for value in asked
    )


def moved(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(moved, value))
    return HOST if isinstance(value, torch.device) and value.type == DEVICE.type else value


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, dict):
        yield from leaves(tuple(value.values()))


def refuse_mixture(func: Any, arguments: Any) -> None:
    """Refuse host tensors in device operations, except scalars."""
    if any(not isinstance(tensor, DeviceTensor) and tensor.dim() for tensor in leaves(arguments)):
        raise HostReadError(f"{getattr(func, '__name__', func)} mixes tensors of the device and of the host")


def on_host(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, tuple | list):
        return type(value)(map(on_host, value))
    return {key: on_host(part) for key, part in value.items()} if isinstance(value, dict) else value


def on_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.as_subclass(DeviceTensor)
    if isinstance(value, tuple | list):  # sort and topk return their own tuple types
        return type(value)([on_device(part) for part in value])
    return value


class DeviceForward:
    """A forward backend whose hidden rows and logits are on the fake device."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def hidden_rows(self, slots: Any) -> Any:
        return on_device(torch.as_tensor(self._forward.hidden_rows(slots)))

    def head(self, hidden: Any) -> Any:
        assert isinstance(hidden, DeviceTensor)
        with torch._C.DisableTorchFunctionSubclass():
            return on_device(torch.as_tensor(self._forward.head(on_host(hidden))))


class Doubling(LogitsProcessor):
    """A minimal registered processor."""

    def __init__(self, config: Any) -> None:
        del config

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * 2


SETTINGS: dict[str, Any] = {
    "logits_processors": [Doubling, "CaptureLogitsProcessor", "ThinkingBudgetLogitsProcessor"]
}


@pytest.fixture
def new_device_engine(new_engine: Callable[..., Any]) -> Callable[[], Any]:
    def make() -> Any:
        stepped = new_engine(**SETTINGS)
        plain = stepped.engine
        stepped.engine = Engine(
            plain.config, DeviceForward(stepped.forward), stepped.text, plain.recorder._eos_token_ids
        )
        return stepped

    return make


ASKS: dict[str, dict[str, Any]] = {
    "a greedy token": {"max_tokens": 1, "temperature": 0},
    "a drawn token with logprobs": {"max_tokens": 3, "seed": 1, "logprobs": 3},
    "a truncated draw": {"max_tokens": 3, "seed": 1, "logprobs": 0, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "entropy and named ids": {"max_tokens": 3, "seed": 2, "logprobs": 2, "entropy": True}
    | {"logprob_token_ids": [3, 40]},
    "processed numbers": {"max_tokens": 3, "seed": 1, "logprobs": 3, "top_k": 5}
    | {"logprobs_mode": "processed_logprobs"},
    "the best of three": {"max_tokens": 3, "seed": 1, "n": 1, "best_of": 3},
    "a scored prompt": {"max_tokens": 0, "prompt_logprobs": 3, "entropy": True},
    "whole prompt rows": {"max_tokens": 0, "prompt_logprobs": -1},
    "a whole row": {"max_tokens": 1, "temperature": 0, "logprobs": -1},
    "bias and allowed tokens": {"max_tokens": 3, "seed": 1, "logprobs": 2, "logit_bias": {40: 2.0}}
    | {"allowed_token_ids": [40, 41, 42, 43]},
    "banned words": {"max_tokens": 4, "temperature": 0, "logprobs": 2, "bad_words": ["the", "a"]},
    "a least length": {"max_tokens": 4, "min_tokens": 3, "seed": 4, "logprobs": 2},
    "penalties": {"max_tokens": 4, "temperature": 0, "logprobs": 2, "repetition_penalty": 1.3}
    | {"presence_penalty": 0.3, "frequency_penalty": 0.2},
    "a grammar": {"max_tokens": 6, "temperature": 0, "logprobs": 2}
    | {"response_format": {"type": "regex", "regex": "[ab]+"}},
    "an explained position": {"max_tokens": 2, "temperature": 0, "logprobs": 2, "logit_bias": {40: 3.0}}
    | {"explain": True, "logits_processors_args": {"doubling": True}},
    "a registered processor": {"max_tokens": 3, "temperature": 0, "logprobs": 2}
    | {"logits_processors_args": {"doubling": True}},
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_request_gives_what_it_gives_on_the_host(
    ask: dict[str, Any], new_engine: Any, new_device_engine: Any, assert_same: Any
) -> None:
    outputs = []
    for engine, where in ((new_engine(**SETTINGS), nullcontext()), (new_device_engine(), Device())):
        output = engine.submit("one", PROMPT, **ask)
        other = engine.submit("other", PROMPT[:3], max_tokens=2, seed=5)
        with where:
            engine.run()
        assert other.outputs[0].error is None
        assert output.outputs[0].error is None, output.outputs[0].error.__cause__
        outputs.append(output)
    assert_same(outputs[1], outputs[0])


class LateCopies:
    """Copies to the host that end after the next step has run."""

    def __init__(self, forward: Any) -> None:
        self.num_late = 0
        self._ran = threading.Condition()
        self._num_runs = 0
        self._is_over = False
        forward.before_run = self._note

    def _note(self, _: Any) -> None:
        with self._ran:
            self._num_runs += 1
            self._ran.notify_all()

    def finish(self) -> None:
        """Let the copies of the last step end, as no step follows it."""
        with self._ran:
            self._is_over = True
            self._ran.notify_all()

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mark(self, tensor: torch.Tensor) -> int:
        assert isinstance(tensor, DeviceTensor)
        return self._num_runs

    def copy(self, tensor: torch.Tensor, target: torch.Tensor, after: int) -> Any:
        def synchronize() -> None:
            with self._ran:
                assert self._ran.wait_for(lambda: self._is_over or self._num_runs > after, LIMIT_S)
                self.num_late += self._num_runs > after
            target.copy_(tensor)

        return SimpleNamespace(synchronize=synchronize)


def test_rows_come_to_the_host_beside_the_next_step(
    new_engine: Any, new_device_engine: Any, assert_same: Any
) -> None:
    plain = new_engine(**SETTINGS)
    want = [plain.submit(title, PROMPT, **ask) for title, ask in ASKS.items()]
    plain.run()
    stepped = new_device_engine()
    copies = LateCopies(stepped.forward)
    loop = OverlappedLoop(stepped.engine, stepped.take, AsyncCPUTransfer(device=copies))
    got = [stepped.submit(title, PROMPT, **ask) for title, ask in ASKS.items()]
    with Device():
        while stepped.engine.has_work:
            loop.step()
        copies.finish()
        loop.close()
    stepped.assert_idle()
    assert copies.num_late > 2, "no copy was under way while the next step ran"
    for mine, theirs in zip(got, want, strict=True):
        assert_same(mine, theirs)


def host_memory(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def copied_at_once(tensor: torch.Tensor, target: torch.Tensor, _after: int) -> Any:
    target.copy_(tensor)
    return SimpleNamespace(synchronize=lambda: None)


def run_overlapped(stepped: Any) -> AsyncCPUTransfer:
    """Run everything with the overlapped loop's threads; return the transfer, which must be empty."""
    device: Any = SimpleNamespace(host_memory=host_memory, mark=lambda _: 0, copy=copied_at_once)
    transfer = AsyncCPUTransfer(device=device)
    loop = OverlappedLoop(stepped.engine, stepped.take, transfer)
    with Device():
        while stepped.engine.has_work:
            loop.step()
        loop.settle()
    assert not transfer._transfers, "a copy was sent that nobody takes"
    loop.close()
    return transfer


# After the first token, forced by the bias, no token is possible.
DEAD: dict[str, Any] = {
    "allowed_token_ids": [1, 82, 89],  # EOS, q and x
    "bad_words": ["qq", "qx"],
    "logit_bias": {82: 100.0},
    "min_tokens": 3,
    "max_tokens": 4,
    "logprobs": 1,
}


def test_draws_that_fail_leave_no_copy_behind(new_device_engine: Any) -> None:
    stepped = new_device_engine()
    for title in ("one", "two", "three"):  # more than there are buffers
        output = stepped.submit(title, PROMPT, **DEAD)
        run_overlapped(stepped)
        assert isinstance(output.outputs[0].error, ConflictingParametersError)
    good = stepped.submit("good", PROMPT, max_tokens=2, logprobs=1)
    run_overlapped(stepped)
    assert good.outputs[0].finish_reason == "length"


def test_a_step_that_fails_behind_its_first_chunk_leaves_no_copy_behind(
    new_device_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped = new_device_engine()
    stepped.engine.sampling.chunk_rows = 1
    head, calls = stepped.engine.forward.head, 0

    def failing(hidden: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("no room for the second chunk")
        return head(hidden)

    monkeypatch.setattr(stepped.engine.forward, "head", failing)
    outputs = [stepped.submit(title, PROMPT, max_tokens=2, logprobs=1) for title in ("one", "two")]
    run_overlapped(stepped)
    assert all(output.outputs[0].finish_reason == "error" for output in outputs)
    good = stepped.submit("good", PROMPT, max_tokens=2, logprobs=1)
    run_overlapped(stepped)
    assert good.outputs[0].finish_reason == "length"


def test_a_dead_end_of_several_processors_fails_its_own_request(new_device_engine: Any) -> None:
    engine = new_device_engine()
    output = engine.submit("dead", PROMPT, **DEAD)
    other = engine.submit("other", PROMPT[:3], max_tokens=2, seed=5)
    with Device():
        engine.run()
    assert isinstance(output.outputs[0].error, ConflictingParametersError)
    assert other.outputs[0].finish_reason == "length"


class TestTheDouble:
    """The fake device refuses what it should."""

    rows: ClassVar[torch.Tensor] = on_device(torch.arange(6.0).reshape(2, 3))

    @pytest.mark.parametrize(
        "read",
        [
            lambda rows: rows.numpy(),
            lambda rows: float(rows[0, 0]),
            lambda rows: int(rows.argmax()),
            lambda rows: bool((rows > 1).any()),
            lambda rows: rows.tolist(),
            lambda rows: rows.max().item(),
            np.asarray,
            lambda rows: np.zeros(9)[rows[0].int()],
            lambda rows: [0] * rows.int()[0, 0],
            lambda rows: rows.data_ptr(),
            lambda rows: torch.equal(rows, rows),
            lambda rows: rows + torch.ones(2, 3),
            lambda rows: torch.cat([rows, torch.ones(1, 3)]),
            lambda rows: rows.sort().values.numpy(),
        ],
    )
    def test_an_implicit_read_is_refused(self, read: Callable[[Any], Any]) -> None:
        with pytest.raises(HostReadError):
            read(self.rows)

    @pytest.mark.parametrize(
        "copy",
        [
            lambda rows: rows.cpu().numpy(),
            lambda rows: rows.to("cpu").numpy(),
            lambda rows: rows.to(torch.float64).cpu().numpy(),
            lambda rows: rows.numpy(force=True),
            lambda rows: rows[torch.tensor([0, 1])].cpu().numpy(),
            lambda rows: (torch.zeros(2, 3, device=rows.device) + rows).cpu().numpy(),
            lambda rows: (torch.zeros(2, 3).to(rows.device) + rows).cpu().numpy(),
            lambda rows: torch.empty(2, 3).copy_(rows.cpu()).numpy(),
        ],
    )
    def test_a_copy_that_says_so_is_made(self, copy: Callable[[Any], Any]) -> None:
        with Device():
            np.testing.assert_array_equal(copy(self.rows), np.arange(6.0).reshape(2, 3))

    def test_it_stands_on_a_device_of_its_own(self) -> None:
        assert self.rows.device.type != "cpu"
        assert isinstance(self.rows.sort().values, DeviceTensor)
