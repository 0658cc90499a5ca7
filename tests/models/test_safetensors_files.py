"""Arrays are written and read as torch's reader and writer of safetensors do it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from logprobe.errors import ParameterError, UnsupportedModelError
from logprobe.kernels.placement import as_tensor
from logprobe.models.loading import as_state, copied, digest_of, read_state, save_state
from logprobe.models.safetensors_files import save_tensors, tensors_of
from refusals import raises

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = {
    "float32": torch.tensor([[1.5, -2.0], [3.0, float("inf")]]),
    "bfloat16": torch.tensor([[1.0, -0.0, 3e38]]).bfloat16(),
    "float16": torch.tensor([0.1, 65504.0]).half(),
    "float64": torch.tensor(1 / 3, dtype=torch.float64),  # no dimension
    "int64": torch.tensor([-(1 << 62)]),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "empty": torch.zeros(0, 4),
}


def bits(values: Any) -> tuple[str, tuple[int, ...], bytes]:
    tensor = as_tensor(values).contiguous()
    return str(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_arrays_are_the_tensors_that_torch_wrote(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors", {"format": "pt"})
    stored, metadata = tensors_of(tmp_path / "x.safetensors")
    assert metadata == {"format": "pt"}
    assert {name: bits(one.read()) for name, one in stored.items()} == {
        name: bits(tensor) for name, tensor in TENSORS.items()
    }
    assert stored["bfloat16"].read().dtype == ml_dtypes.bfloat16
    stored["float32"].read()[:] = 0  # the file stays
    assert torch.equal(load_file(tmp_path / "x.safetensors")["float32"], TENSORS["float32"])


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "theirs.safetensors", {"a": "b"})
    stored, metadata = tensors_of(tmp_path / "theirs.safetensors")
    arrays = {name: one.read() for name, one in stored.items()}
    save_tensors(arrays, tmp_path / "ours.safetensors", dict(metadata))
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_a_type_that_numpy_lacks_is_refused_when_it_is_read(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    stored, _ = tensors_of(tmp_path / "x.safetensors")
    assert stored["x"].shape == (4,)
    with pytest.raises(UnsupportedModelError, match="x has the dtype F4"):
        stored["x"].read()


def test_a_digest_covers_names_dtypes_shapes_and_bytes() -> None:
    want = hashlib.blake2b(digest_size=16)
    for name in sorted(TENSORS):
        dtype, shape, data = bits(TENSORS[name])
        want.update(json.dumps([name, dtype.removeprefix("torch."), list(shape)]).encode() + data)
    assert digest_of(TENSORS) == digest_of(copied(TENSORS)) == f"blake2b:{want.hexdigest()}"


def test_a_state_may_mix_tensors_and_arrays_and_shared_memory_is_copied_once(tmp_path: Path) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = torch.ones(2, 2).bfloat16()
    given = {"a": weight, "b": weight, "turned": weight.T, "c": tensor, "d": tensor}
    state = as_state(given)
    assert all(state[name] is given[name] for name in given)
    copies = copied(state)
    assert copies["a"] is copies["b"] is not weight
    assert copies["c"] is copies["d"]
    weight[:] = 0
    assert copies["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.array_equal(copies["turned"], copies["a"].T)
    save_state(copies, tmp_path)
    assert {name: bits(one) for name, one in read_state(tmp_path).items()} == {
        name: bits(one) for name, one in copies.items()
    }


@pytest.mark.parametrize(
    "weight", [torch.zeros(2).to(torch.float8_e4m3fn), np.zeros(2, ">f4"), np.array(["x"]), np.array([None])]
)
def test_dtypes_that_no_weight_has_are_refused(weight: Any) -> None:
    with raises(ParameterError, parameter="weights", match="is not a dtype of weights"):
        as_state({"x": weight})
