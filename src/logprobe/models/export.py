"""Export a GGUF model to safetensors, for programs that cannot read GGUF (`logprobe models export`)."""

from __future__ import annotations

import json
import shutil
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal

import ml_dtypes
import numpy as np

from logprobe.errors import OutputError, UnsupportedModelError
from logprobe.models.config_files import CONFIG
from logprobe.models.loading import source_of
from logprobe.models.resolution import checked_folder, has_gguf
from logprobe.models.safetensors_files import save_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from logprobe.kernels.arrays import Array
    from logprobe.models.resolution import ModelFiles
    from logprobe.models.sources import Source

SHARD_BYTES: Final = 2_000_000_000  # maximum size of a file, which is held in memory while it is written
COPIED: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
DTYPES: Final[dict[str, Any]] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
INDEX: Final = "model.safetensors.index.json"


def export_model(files: ModelFiles, folder: Path, *, dtype: Literal["float32", "bfloat16"]) -> None:
    """Write a GGUF model to a new folder: weights as safetensors, configuration and tokenizer.

    Raises:
        ModelNotFoundError: the GGUF file was moved or changed.
        UnsupportedModelError: the model is stored as safetensors already.
        OutputError: the folder is not empty, or cannot be written.
    """
    own = checked_folder(files.folder)
    if not has_gguf(own):
        raise UnsupportedModelError(
            f"{files.name}: is stored as safetensors already, in {own}; use that folder"
        )
    source = source_of(files)
    assert source is not None, "a folder with a GGUF file"
    config = json.loads((own / CONFIG).read_bytes()) | {"dtype": dtype}
    kind = np.dtype(DTYPES[dtype])
    shards = list(_shards(source.shapes, kind.itemsize))
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OutputError(f"{folder}: is not empty; give a new folder")
        for name, shard in zip(names, shards, strict=True):
            save_tensors(_read(source, shard, kind), folder / name, {"format": "pt"})
        if len(shards) > 1:
            places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            size = kind.itemsize * sum(map(prod, source.shapes.values()))
            index = {"metadata": {"total_size": size}, "weight_map": places}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for name in COPIED:
            if (own / name).is_file():
                shutil.copyfile(own / name, folder / name)
        # Last, so that an incomplete folder is not taken for a model.
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(f"{folder}: cannot be written ({error})") from error


def _shards(shapes: Mapping[str, tuple[int, ...]], item_bytes: int) -> Iterator[list[str]]:
    """Yield a list of tensor names for each file to write."""
    shard: list[str] = []
    size = 0
    for name, shape in shapes.items():
        num_bytes = item_bytes * prod(shape)
        if shard and size + num_bytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += num_bytes
    yield shard


def _read(source: Source, names: list[str], dtype: np.dtype[Any]) -> dict[str, Array]:
    return {name: source.read(name).astype(dtype) for name in names}
