"""The index of a GPU reaches the places that use it; without a GPU, stand-ins record it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from logprobe.config import EngineConfig
from logprobe.engine.forward import device as devices
from logprobe.engine.forward import load, native
from logprobe.engine.forward.device import choose_device, on_device
from logprobe.engine.forward.native import NativeForward
from logprobe.engine.forward.torch import transformers_ready
from logprobe.engine.request import Requests
from logprobe.errors import ParameterError, UnsupportedModelError
from logprobe.kernels import extract
from logprobe.models import resolve
from logprobe.sampling import SamplingParams
from logprobe.testing import fake_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Current GPU by thread, on a machine that seems to have three."""
    of_thread: dict[int, int] = {}

    @contextmanager
    def device(index: int) -> Iterator[None]:
        of_thread[threading.get_ident()] = index
        try:
            yield
        finally:
            del of_thread[threading.get_ident()]

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    return of_thread


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:1", "cuda:12"])
def test_a_gpu_is_chosen_by_its_index(device: str) -> None:
    assert EngineConfig(device=device).device == ("cuda" if device == "cuda:0" else device)
    if device != "auto":
        assert EngineConfig(device=torch.device(device)).device == device.removesuffix(":0")


@pytest.mark.parametrize(
    "device", ["cuda:", "cuda:-1", "cuda:x", "cuda:01", "cuda:1:2", "cuda:\u0661", "cpu:0"]
)
def test_what_is_no_index_is_refused(device: str) -> None:
    with pytest.raises(ParameterError, match="cuda:N") as caught:
        EngineConfig(device=device)
    assert caught.value.parameter == "device"


def test_a_gpu_that_is_not_there_is_refused(current: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [choose_device(name) for name in ("auto", "cpu", "cuda", "cuda:2")] == [
        *("cuda", "cpu", "cuda", "cuda:2")
    ]
    with pytest.raises(ParameterError, match="3 GPUs; use an index below 3") as caught:
        choose_device("cuda:3")
    assert caught.value.parameter == "device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == "cpu"
    with pytest.raises(ParameterError, match="finds no GPU"):
        choose_device("cuda:0")
    assert not current


WITHOUT_DRIVER = """
import sys
from pathlib import Path
from logprobe.engine.forward import device, native
device.DRIVERS, device.AMD_DRIVER = ("no_such_library.so",), Path("/no/such/file")
assert device.choose_device("auto") == device.choose_device("cpu") == "cpu"
with device.on_device("cpu"):
    pass
assert "torch" not in sys.modules
"""


def test_a_machine_without_a_gpu_driver_needs_no_torch() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_DRIVER], check=True, timeout=120)


def test_a_gpu_needs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda _: None)
    with pytest.raises(ParameterError, match="needs torch") as caught:
        choose_device("cuda")
    assert caught.value.parameter == "device"


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2), ("cpu", None)])
def test_a_thread_uses_the_gpu(current: dict[int, int], device: str, index: int | None) -> None:
    with on_device(device):
        assert current.get(threading.get_ident()) == index
    assert not current


def test_a_model_is_loaded_on_its_gpu(
    current: dict[int, int], monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path
) -> None:
    reached: list[Any] = []

    def cuda_decoder(*_: Any, device: str, **__: Any) -> str:
        reached.append((device, current.get(threading.get_ident())))
        return "a stand-in"

    def load_model(*_: Any, device: str, **__: Any) -> None:
        reached.append((device, current.get(threading.get_ident())))
        raise UnsupportedModelError("a stand-in")

    monkeypatch.setattr("logprobe.engine.forward.torch.cuda.build.cuda_decoder", cuda_decoder)
    monkeypatch.setattr(transformers_ready, "load_model", load_model)
    folder = str(tiny_model_folder)
    with pytest.raises(UnsupportedModelError):
        NativeForward(EngineConfig(model=folder, device="cuda:2"), resolve(folder))
    assert reached == [("cuda:2", 2)] * 2


def test_the_cache_is_sized_by_the_memory_of_its_gpu(
    current: dict[int, int], monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path
) -> None:
    def mem_get_info() -> tuple[int, int]:
        assert current[threading.get_ident()] == 1
        return 10, 10

    made = load.make_ready

    def on_cpu(*args: Any, **options: Any) -> Any:
        assert options["device"] == "cuda:1"
        return made(*args, **options | {"device": "cpu"})

    monkeypatch.setattr(native, "make_ready", on_cpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    folder = str(tiny_model_folder)
    for given in (None, 1 << 20):
        config = EngineConfig(model=folder, device="cuda:1", kv_cache_memory_bytes=given)
        with pytest.raises(ParameterError) as caught:
            NativeForward(config, resolve(folder))
        assert caught.value.parameter == "kv_cache_memory_bytes"


def test_steps_run_on_the_gpu_of_the_engine(current: dict[int, int]) -> None:
    seen: list[int | None] = []
    model = fake_model(device="cuda:2")
    engine: Any = model.engine.core
    step = engine.engine.step
    engine.engine.step = lambda: (seen.append(current.get(threading.get_ident())), step())[1]
    try:
        admitted = Requests(model.engine).admit(np.array([1, 2], np.int32), SamplingParams(max_tokens=1))
        model.engine.submit([admitted])
        asyncio.run(model.engine.result(admitted.request.request_id))
    finally:
        model.engine.close()
    assert set(seen) == {2}


def test_kernels_run_on_the_gpu_of_their_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    device_of = torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: seen.append(tensor) or device_of(tensor))
    # Triton's interpreter runs the GPU kernel on a tensor of the CPU, which else becomes an array.
    monkeypatch.setattr("logprobe.kernels.extraction.api.as_rows", lambda rows: rows)
    monkeypatch.setattr("logprobe.kernels.extraction.device.has_kernel", lambda _: True)
    logits = torch.zeros(1, 8)
    extract(logits, torch.tensor([3]), 0)
    assert [tensor.shape for tensor in seen] == [logits.shape]
