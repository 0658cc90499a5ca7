"""A model's folder → the transformers module and the tokenizer, ready for exact use.

Follows `resolve`; the engine takes the module and the tokenizer from here.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections import Counter
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from logprobe.errors import (
    LogprobeError,
    ModelNotFoundError,
    ParameterError,
    UnsupportedModelError,
    in_one_line,
    require,
)
from logprobe.models.cache import GGUF
from logprobe.models.folder import check_files, check_numbers, is_exhausted, reading_errors
from logprobe.models.resolution import checked_folder, has_gguf

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

    from logprobe.models.lazy import LazyModel
    from logprobe.models.resolution import ModelFiles
    from logprobe.models.sources import Source

# Before all names: DDP and PEFT.
PREFIXES = ("module.", "base_model.model.")
# Anywhere in a name: torch.compile, FSDP and activation checkpointing wrap modules, too.
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
LORA_PARTS = (".lora_A.", ".lora_B.", ".lora_embedding_", ".lora_magnitude_vector.", ".base_layer.")

State: TypeAlias = "Mapping[str, torch.Tensor]"
"""A model's weights by name."""


def load_model(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    attn_implementation: str = "eager",
) -> PreTrainedModel:
    """Load the causal language model, for inference only; no code of the folder is run.

    Raises:
        ModelNotFoundError: the folder lacks a file.
        UnsupportedModelError: transformers has no such model, or the weights are no safetensors or GGUF.
    """
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
    """Refuse a model that lacks tensors, which transformers fills with random numbers."""
    if missing := sorted(names):
        raise ValueError(f"the weights lack {len(missing)} of its tensors, such as {missing[0]}")


def load_lazily(files: ModelFiles, state: State | None = None) -> LazyModel | None:
    """The model of some files, or of a state, float32, with matrices that are read when they are needed.

    None where transformers alone knows how to make its parameters of what there is.
    """
    import torch
    from transformers import GenerationConfig

    from logprobe.models.lazy import lazy_model
    from logprobe.models.sources import StateSource

    source = source_of(files) if state is None else StateSource(state)
    if source is None:
        return None
    config = load_config(files)
    if state is None:
        check_sizes(files, config)
    model = lazy_model(config, source, dtype=torch.float32)
    if model is not None and (files.folder / "generation_config.json").is_file():
        model.module.generation_config = GenerationConfig.from_pretrained(files.folder, local_files_only=True)
    return model


def check_sizes(files: ModelFiles, config: PreTrainedConfig) -> None:
    """Refuse a configuration that describes a model of other sizes than its weights can have.

    Raises:
        UnsupportedModelError: its module has many more numbers than the files, or cannot be built.
    """
    from logprobe.models.lazy import empty_model
    from logprobe.models.sources import weight_bytes

    with reading_errors(f"{files.name}: config.json"):
        module = empty_model(config)
        tensors = itertools.chain(module.parameters(), module.buffers())
        num_numbers = sum(tensor.numel() for tensor in tensors)
    check_numbers(files.name, num_numbers, weight_bytes(files.folder))


def source_of(files: ModelFiles) -> Source | None:
    """A model's weights where they lie; None where the folder holds none.

    Raises:
        InputError: a GGUF file cannot be read.
        UnsupportedModelError: a file of safetensors cannot be read.
    """
    from logprobe.models.gguf.weights import GgufSource
    from logprobe.models.sources import FolderSource

    if has_gguf(files.folder):
        return GgufSource(files.folder / GGUF, load_config(files))
    return FolderSource(files.folder) if any(files.folder.glob("*.safetensors")) else None


def num_weights(files: ModelFiles) -> int:
    """How many numbers a model's files hold."""
    source = source_of(files)
    return 0 if source is None else sum(map(math.prod, source.shapes.values()))


def _of_gguf(files: ModelFiles, dtype: torch.dtype, attn_implementation: str) -> Any:
    """The module of transformers with the numbers of a GGUF file."""
    from logprobe.models.lazy import lazy_model

    source = source_of(files)
    assert source is not None, "a folder with a GGUF file"
    lazy = lazy_model(load_config(files), source, dtype=dtype, attn_implementation=attn_implementation)
    if lazy is None:
        raise ValueError("its tensors are not the module's")
    lazy.materialise_()
    return lazy.module


def load_state(
    files: ModelFiles,
    state: State,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """The module of some files with other weights; it may hold these very ones, where dtype and device fit.

    Raises:
        UnsupportedModelError: a weight is missing, unknown, or of another shape.
    """
    from logprobe.models.lazy import empty_model

    config = load_config(files)
    loaded, info = type(empty_model(config)).from_pretrained(
        None,
        config=config,
        state_dict=dict(state),
        dtype=dtype,
        attn_implementation="eager",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    wrong = {
        "missing": sorted(info["missing_keys"]),
        "unknown": sorted(info["unexpected_keys"]),
        "of another shape": sorted(str(one[0]) for one in info["mismatched_keys"]),
    }
    listed = [f"{len(names)} {kind} ({names[0]})" for kind, names in wrong.items() if names]
    if listed:
        raise UnsupportedModelError(
            f"the weights do not fit the model: {', '.join(listed)}; give all of the same model's"
        )
    ready: PreTrainedModel = loaded.to(device).eval().requires_grad_(requires_grad=False)
    return ready


def as_state(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A trainer's weights as the model has them: tensors, by names without what wrappers put before them.

    NumPy's arrays are copied, tensors are not.

    Raises:
        ParameterError: a value that is neither, or LoRA weights beside those that they change.
    """
    import numpy as np
    import torch

    state: dict[str, torch.Tensor] = {}
    for name, weight in zip(plain_names(weights), weights.values(), strict=True):
        try:
            state[name] = torch.from_numpy(np.array(weight)) if isinstance(weight, np.ndarray) else weight
        except TypeError as error:
            remedy = "is of no type that torch knows; give float32, float16 or a torch tensor"
            raise ParameterError("weights", f"{name}: {weight.dtype} {remedy}") from error
        is_tensor = isinstance(state[name], torch.Tensor)
        require(
            is_tensor, "weights", f"{name} is {type(weight).__name__}; give a torch tensor or NumPy array"
        )
    return state


def plain_names(names: Iterable[str]) -> list[str]:
    """Names of weights without what DDP, torch.compile, FSDP, checkpointing and PEFT put before them.

    Raises:
        ParameterError: a name that is no text or comes twice, or LoRA weights beside those that they change.
    """
    plain = []
    for name in names:
        require(isinstance(name, str), "weights", f"must go by name, got {name!r:.40}")
        remedy = "give merge_and_unload().state_dict(), or its folder to add_lora"
        is_merged = not any(part in name for part in LORA_PARTS)
        require(is_merged, "weights", f"{name} is a part of a PEFT model that is not merged; {remedy}")
        plain.append(reduce(lambda left, wrapper: left.replace(wrapper, ""), WRAPPERS, name))
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in plain):
            plain = [name.removeprefix(prefix) for name in plain]
    twice = [name for name, count in Counter(plain).items() if count > 1][:1]
    require(not twice, "weights", f"hold {twice} twice, with and without what wrappers put before it")
    return plain


def copied(state: State) -> dict[str, torch.Tensor]:
    """Weights of a caller's, so that training may go on: on the CPU; what shares memory does there too."""
    copies: dict[tuple[int, ...], torch.Tensor] = {}
    copied: dict[str, torch.Tensor] = {}
    for name, weight in state.items():
        place = (weight.data_ptr(), *weight.shape, *weight.stride())
        if place not in copies:
            copies[place] = weight.detach().to("cpu", copy=True)
        copied[name] = copies[place]
    return copied


def read_state(folder: str | Path) -> dict[str, torch.Tensor]:
    """The weights of a folder's safetensors files by name, mapped from the disk.

    Raises:
        ModelNotFoundError: there are none.
        UnsupportedModelError: a file cannot be read, or is no regular one.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_files(Path(folder))  # safetensors waits for a FIFO's writer, with all threads of the process
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ModelNotFoundError(f"{folder}: no *.safetensors there; name the folder that holds the weights")
    state: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            state |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise UnsupportedModelError(f"{file}: cannot be read ({in_one_line(error)})") from error
    return dict(zip(plain_names(state), state.values(), strict=True))


def digest_of(state: State) -> str:
    """What tells weights apart: `blake2b:` and 32 hexadecimal digits, the same for a state and for its files.

    BLAKE2b of 16 bytes over the tensors by ascending name: name, dtype and shape as one JSON array each, then
    the numbers' bytes in row order.
    """
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(state.items()):
        tensor = weight.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(json.dumps([name, dtype, list(tensor.shape)]).encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return f"blake2b:{digest.hexdigest()}"


def save_state(state: Mapping[str, torch.Tensor], folder: str | Path) -> None:
    """Write weights by name as `read_state` reads them."""
    tensors: dict[str, torch.Tensor] = {}
    places: set[int] = set()
    for name, weight in state.items():
        tensor = weight.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        # The format has no tensors that share memory, as those of a tied head do.
        tensors[name] = tensor.clone() if place in places else tensor
        places.add(place)
    save_tensors(tensors, Path(folder) / "model.safetensors")


def save_tensors(
    tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the mode that the umask gives new files.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata)  # makes a file that only its owner can read
    except SafetensorError as error:
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from error
    path.chmod(mode)


def load_config(files: ModelFiles) -> PreTrainedConfig:
    """Load the model's configuration alone; no code of the folder is run.

    Raises:
        UnsupportedModelError: transformers knows no such model, or the file is not valid.
    """
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            files.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the configuration's own checks, which may raise anything
        raise UnsupportedModelError(
            f"{files.name}: transformers cannot read its config.json ({in_one_line(error)}); correct it, or "
            "use a version of transformers that knows the model"
        ) from error
    return config


def load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerFast:
    """Load the tokenizer that `tokenizer.json` describes, exactly as it stands there.

    `encode` and `__call__` add no BOS or EOS unless called with `add_special_tokens=True`, which follows the
    model's own policy. Decoding never tidies spaces.

    Raises:
        ModelNotFoundError: the folder lacks a file.
        UnsupportedModelError: the file cannot be read.
    """
    from logprobe.models.tokenizer import ExactTokenizer

    folder = checked_folder(files.folder)
    with reading_errors(f"{files.name}: tokenizer.json"):
        tokenizer: PreTrainedTokenizerFast = ExactTokenizer.from_pretrained(
            folder, local_files_only=True, clean_up_tokenization_spaces=False
        )
    return tokenizer


def text_config(config: PreTrainedConfig) -> Any:
    """Give the language model's part of a config that may also describe images or sound."""
    return config.get_text_config(decoder=True)
