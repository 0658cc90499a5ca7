"""Load a transformers module, configuration, weights and tokenizer from the folder found by `resolve`."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
from collections import Counter
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from logprobe.errors import (
    LogprobeError,
    MissingPackageError,
    ModelNotFoundError,
    UnsupportedModelError,
    in_one_line,
    require,
)
from logprobe.models.cache import GGUF
from logprobe.models.config_files import GENERATION_CONFIG, read_config
from logprobe.models.folder import check_files, check_numbers, is_exhausted, reading_errors
from logprobe.models.resolution import checked_folder, has_gguf
from logprobe.models.safetensors_files import DTYPES, save_tensors, tensors_of
from logprobe.models.sources import StateSource, host_array, weight_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

    from logprobe.kernels.arrays import Array
    from logprobe.models.lazy import LazyModel
    from logprobe.models.resolution import ModelFiles
    from logprobe.models.sources import Source

NEEDS_TRANSFORMERS = "transformers may be able to run it: pip install 'logprobe[torch]'"
# Prefixes that DDP and PEFT add to all names.
PREFIXES = ("module.", "base_model.model.")
# Parts that torch.compile, FSDP and activation checkpointing add to names.
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
LORA_PARTS = (".lora_A.", ".lora_B.", ".lora_embedding_", ".lora_magnitude_vector.", ".base_layer.")

# Dtypes of weights in memory; torch gives float8 tensors to NumPy only byte by byte.
DTYPE_NAMES = {dtype.name for dtype in DTYPES.values() if not dtype.name.startswith("float8")}

State: TypeAlias = "Mapping[str, Array | torch.Tensor]"
"""A model's weights by name."""


def has_transformers() -> bool:
    """Return True if torch and transformers are installed; models are then verified against transformers."""
    try:
        return all(find_spec(name) is not None for name in ("torch", "transformers"))
    except ModuleNotFoundError:  # from a finder that refuses them
        return False


def check_transformers(what: str) -> None:
    """Check that torch and transformers are installed.

    Raises:
        MissingPackageError: one of them is missing; the message says that `what` needs them.
    """
    if not has_transformers():
        raise MissingPackageError(f"{what} needs torch and transformers; pip install 'logprobe[torch]'")


def load_model(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    attn_implementation: str = "eager",
) -> PreTrainedModel:
    """Load a model's transformers module for inference; no code in the folder is executed.

    Raises:
        ModelNotFoundError: the folder lacks a file.
        UnsupportedModelError: transformers cannot load the model, or the weights are neither safetensors
            nor GGUF.
    """
    check_transformers(f"{files.name}: the transformers model")
    from transformers import AutoModelForCausalLM

    from logprobe.models.lazy import LOAD_ELSEWHERE, check_causal

    folder = checked_folder(files.folder)
    config = load_config(files)
    check_causal(config)
    check_sizes(files, config)
    try:
        if has_gguf(folder):
            model = _of_gguf(files, dtype, attn_implementation)
        else:
            auto: Any = AutoModelForCausalLM
            model, info = auto.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=attn_implementation,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            _check_no_missing(info["missing_keys"])
    except LogprobeError:
        raise
    except Exception as error:  # the model's own code, which may raise anything
        if is_exhausted(error):
            raise
        raise UnsupportedModelError(
            f"{files.name}: transformers cannot load it ({in_one_line(error)}); {LOAD_ELSEWHERE}"
        ) from error
    ready: PreTrainedModel = model.to(device).eval().requires_grad_(requires_grad=False)
    return ready


def _check_no_missing(names: Iterable[str]) -> None:
    """Raise `ValueError` for missing weights, which transformers would fill with random numbers."""
    if missing := sorted(names):
        raise ValueError(f"the weights lack {len(missing)} tensors, such as {missing[0]}")


def load_lazily(files: ModelFiles, state: State | None = None) -> LazyModel | None:
    """Load a float32 model whose matrices are read on demand, from its files or from `state`.

    Return None if there are no weights, or if only transformers can convert them; see `lazy_model`.
    """
    import torch
    from transformers import GenerationConfig

    from logprobe.models.lazy import lazy_model

    source = source_of(files) if state is None else StateSource(state)
    if source is None:
        return None
    config = load_config(files)
    if state is None:
        check_sizes(files, config)
    model = lazy_model(config, source, dtype=torch.float32)
    if model is not None and (files.folder / GENERATION_CONFIG).is_file():
        model.module.generation_config = GenerationConfig.from_pretrained(files.folder, local_files_only=True)
    return model


def check_sizes(files: ModelFiles, config: PreTrainedConfig) -> None:
    """Check that a configuration does not describe a much larger model than the weight files can hold.

    Raises:
        UnsupportedModelError: the module has many more parameters than the files can hold, or cannot be
            built.
    """
    from logprobe.models.lazy import empty_model

    with reading_errors(f"{files.name}: config.json"):
        module = empty_model(config)
        tensors = itertools.chain(module.parameters(), module.buffers())
        num_numbers = sum(tensor.numel() for tensor in tensors)
    check_numbers(files.name, num_numbers, weight_bytes(files.folder))


def source_of(files: ModelFiles) -> Source | None:
    """Return a source that reads a model's weights from its files; None if the folder has no weights.

    Raises:
        InputError: a GGUF file cannot be read.
        UnsupportedModelError: a safetensors file cannot be read.
    """
    from logprobe.models.gguf.weights import GgufSource
    from logprobe.models.sources import FolderSource

    if has_gguf(files.folder):
        return GgufSource(files.folder / GGUF, read_config(files.folder))
    return FolderSource(files.folder) if any(files.folder.glob("*.safetensors")) else None


def num_weights(files: ModelFiles) -> int:
    """Return the number of weights in a model's files."""
    source = source_of(files)
    return 0 if source is None else sum(map(math.prod, source.shapes.values()))


def _of_gguf(files: ModelFiles, dtype: torch.dtype, attn_implementation: str) -> Any:
    """Load a transformers module with the weights of a GGUF file."""
    from logprobe.models.lazy import lazy_model

    source = source_of(files)
    assert source is not None, "a folder with a GGUF file"
    lazy = lazy_model(load_config(files), source, dtype=dtype, attn_implementation=attn_implementation)
    if lazy is None:
        raise ValueError("its tensors do not match the module's parameters")
    lazy.materialise_()
    return lazy.module


def load_state(
    files: ModelFiles,
    state: State,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Load a model with the weights in `state`; weights that have the right dtype and device may be shared.

    Raises:
        UnsupportedModelError: a weight is missing, unknown, or has another shape.
    """
    from logprobe.kernels.placement import as_tensor
    from logprobe.models.lazy import empty_model

    config = load_config(files)
    loaded, info = type(empty_model(config)).from_pretrained(
        None,
        config=config,
        state_dict={name: as_tensor(host_array(weight)) for name, weight in state.items()},
        dtype=dtype,
        attn_implementation="eager",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    wrong = {
        "missing": sorted(info["missing_keys"]),
        "unknown": sorted(info["unexpected_keys"]),
        "with another shape": sorted(str(one[0]) for one in info["mismatched_keys"]),
    }
    listed = [f"{len(names)} {kind} ({names[0]})" for kind, names in wrong.items() if names]
    if listed:
        raise UnsupportedModelError(
            f"weights: do not match the model: {', '.join(listed)}; give all weights of the same model"
        )
    ready: PreTrainedModel = loaded.to(device).eval().requires_grad_(requires_grad=False)
    return ready


def as_state(weights: Mapping[str, Any]) -> State:
    """Return weights from a trainer under the model's names; see `plain_names`. Nothing is copied.

    Raises:
        ParameterError: a value is not an array or tensor, its dtype is not supported, or for the reasons
            given in `plain_names`.
    """
    # Not imported: if nothing has imported torch, no value is a tensor.
    kinds = (np.ndarray, getattr(sys.modules.get("torch"), "Tensor", np.ndarray))
    for name, weight in weights.items():
        is_array = isinstance(weight, kinds)
        require(
            is_array, "weights", f"{name} is a {type(weight).__name__}; give a torch tensor or NumPy array"
        )
        is_known = _dtype_name(weight) in DTYPE_NAMES
        remedy = "is not a dtype of weights; give float32, bfloat16 or float16"
        require(is_known, "weights", f"{name}: {_dtype_name(weight)} {remedy}")
    return dict(zip(plain_names(weights), weights.values(), strict=True))


def _dtype_name(weight: Any) -> str:
    """Return the name of an array's or tensor's dtype, such as `bfloat16`."""
    return str(weight.dtype).removeprefix("torch.")


def plain_names(names: Iterable[str]) -> list[str]:
    """Remove what DDP, torch.compile, FSDP, activation checkpointing and PEFT add to weight names.

    Raises:
        ParameterError: a name is not a string, occurs twice, or belongs to unmerged LoRA weights.
    """
    plain = []
    for name in names:
        require(isinstance(name, str), "weights", f"must have strings as keys, got {name!r:.40}")
        remedy = "give merge_and_unload().state_dict(), or load the adapter's folder with add_lora"
        is_merged = not any(part in name for part in LORA_PARTS)
        require(is_merged, "weights", f"{name} belongs to an unmerged PEFT model; {remedy}")
        plain.append(reduce(lambda left, wrapper: left.replace(wrapper, ""), WRAPPERS, name))
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in plain):
            plain = [name.removeprefix(prefix) for name in plain]
    twice = [name for name, count in Counter(plain).items() if count > 1][:1]
    require(
        not twice,
        "weights",
        f"have the name {twice} twice after the prefixes of wrappers (such as module.) are removed; "
        "pass the state dict of a single model",
    )
    return plain


def copied(state: State) -> dict[str, Array]:
    """Copy weights to main memory, so that training can continue.

    Weights that share memory, such as a tied output head, share their copy.
    """
    copies: dict[tuple[Any, ...], Array] = {}
    copied: dict[str, Array] = {}
    for name, weight in state.items():
        place = _place(weight)
        if place not in copies:
            copies[place] = np.array(host_array(weight), order="C")
        copied[name] = copies[place]
    return copied


def _place(weight: Array | torch.Tensor) -> tuple[Any, ...]:
    """Return what identifies the memory of a weight: address, dtype, shape and strides."""
    if isinstance(weight, np.ndarray):
        address = weight.__array_interface__["data"][0]
        return address, weight.dtype, weight.shape, weight.strides
    return weight.data_ptr(), weight.dtype, (*weight.shape,), weight.stride()


def read_state(folder: str | Path) -> dict[str, Array]:
    """Map the safetensors files in a folder into memory and return the weights by name.

    Raises:
        ModelNotFoundError: the folder has no safetensors files.
        UnsupportedModelError: a file cannot be read, or is not a regular file.
    """
    from safetensors import SafetensorError

    check_files(Path(folder))  # opening a FIFO would block all threads
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ModelNotFoundError(f"{folder}: has no *.safetensors; give the folder with the weights")
    state: dict[str, Array] = {}
    for file in files:
        try:
            state |= {name: tensor.read() for name, tensor in tensors_of(file)[0].items()}
        except (OSError, SafetensorError) as error:
            raise UnsupportedModelError(
                f"{file}: cannot be read ({in_one_line(error)}); save the weights again"
            ) from error
    return dict(zip(plain_names(state), state.values(), strict=True))


def digest_of(state: State) -> str:
    """Return a version for weights: `blake2b:` and 32 hex digits, the same in memory and in files.

    The 16-byte BLAKE2b digest covers the weights in ascending order of their names: for each weight, a JSON
    array of its name, dtype and shape, then its bytes in row-major order.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(state.items()):
        array = np.asarray(host_array(weight), order="C")
        digest.update(json.dumps([name, array.dtype.name, list(array.shape)]).encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return f"blake2b:{digest.hexdigest()}"


def save_state(state: State, folder: str | Path) -> None:
    """Write weights to a folder that `read_state` can read."""
    arrays = {name: host_array(weight) for name, weight in state.items()}
    save_tensors(arrays, Path(folder) / "model.safetensors")


def load_config(files: ModelFiles) -> PreTrainedConfig:
    """Load the model's configuration; no code in the folder is executed.

    Raises:
        UnsupportedModelError: transformers does not support the model, or the file is not valid.
    """
    check_transformers(f"{files.name}: the transformers configuration")
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            files.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # configuration classes check values and may raise anything
        raise UnsupportedModelError(
            f"{files.name}: transformers cannot read its config.json ({in_one_line(error)}); fix it, or "
            "use a version of transformers that supports the model"
        ) from error
    return config


def load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerFast:
    """Load the tokenizer in `tokenizer.json`.

    `encode` and `__call__` add BOS and EOS, as the model specifies, only with `add_special_tokens=True`.
    Decoding never cleans up spaces.

    Raises:
        ModelNotFoundError: the folder lacks a file.
        UnsupportedModelError: the file cannot be read.
    """
    check_transformers(f"{files.name}: the transformers tokenizer")
    from logprobe.models.tokenizer import ExactTokenizer

    folder = checked_folder(files.folder)
    with reading_errors(f"{files.name}: tokenizer.json"):
        tokenizer: PreTrainedTokenizerFast = ExactTokenizer.from_pretrained(
            folder, local_files_only=True, clean_up_tokenization_spaces=False
        )
    return tokenizer
