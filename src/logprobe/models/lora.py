"""A folder of LoRA weights → their matrices by the module that each belongs to (Hu et al. 2021).

peft reads the configuration, matches names, patterns and shapes against an empty copy of the model, and loads
the weights; the engine takes the matrices from here.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from logprobe.errors import ModelNotFoundError, UnsupportedModelError
from logprobe.kernels.layers.forms import pack_floats
from logprobe.models.cache import checksums_of, listed_version
from logprobe.models.quiet import quiet_transformers
from logprobe.models.resolution import looks_like_hub_id

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from logprobe.kernels.layers.forms import PanelWeights

PREFIX = "base_model.model."  # that peft writes before the names of modules
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as peft names them
PATTERN_LIMIT_S = 10
MOST_ID = 2**31 - 1  # that a signed 32-bit number holds
# A pattern that is none is peft's to tell.
TRY_PATTERNS = """
import contextlib, json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    with contextlib.suppress(re.error, RecursionError):
        for name in names:
            re.fullmatch(pattern, name), re.match(rf"(.*\\.)?({pattern})$", name)
"""
# Options of peft that change more than the linear layers' products, with their neutral values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modules_to_save": (None, []),
    "bias": ("none",),
    "use_dora": (False,),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
}


@dataclass(frozen=True, eq=False)
class LowRank:
    """What LoRA weights add to one linear layer: `x @ down @ up`, the scale already in `up`."""

    down: torch.Tensor  # (in_features, rank)
    up: torch.Tensor  # (rank, out_features)

    @cached_property
    def panels(self) -> tuple[PanelWeights, PanelWeights]:
        """Both for the kernels of a CPU, made when they are first asked for."""
        return pack_floats(self.down.T), pack_floats(self.up.T)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoraWeights:
    """LoRA weights in the forward pass; they last as long as a request or the engine holds them."""

    name: str
    path: str  # resolved
    number: int  # of the load: a name that is loaded again has another, for the caches to tell
    parts: dict[str, LowRank]  # by the full name of the linear layer


def stable_id(name: str) -> int:
    """A number for LoRA weights, where an engine wants one: the same in every process, in [1, 2**31 - 1]."""
    digest = hashlib.shake_128(name.encode("utf-8", "surrogatepass")).digest(4)
    return int.from_bytes(digest, "big") % (MOST_ID - 1) + 1


def resolved_folder(path: str | Path) -> Path:
    """Where weights lie: a local folder, or what the Hugging Face cache holds of an id; links resolved."""
    folder = Path(path).expanduser()
    if not folder.is_dir() and looks_like_hub_id(str(path)):
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(str(path), CONFIG)
        if isinstance(config, str):
            folder = Path(config).parent
    return folder.resolve()


def lora_version(folder: Path) -> str:
    """What tells LoRA weights from others: `sha256:` and the digest of the lines of `sha256sum adapter_*`.

    Raises:
        UnsupportedModelError: the files cannot be read.
    """
    files = sorted(path for path in folder.glob("adapter_*") if path.is_file())
    try:
        digests = checksums_of(files)
    except OSError as error:
        reason = error.strerror or error
        raise UnsupportedModelError(f"{folder}: cannot be read ({reason}); look who may read it") from error
    return listed_version(files, digests)


def check_files(name: str, folder: Path) -> None:
    """Refuse a folder that lacks a file.

    Raises:
        ModelNotFoundError: it does.
    """
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise ModelNotFoundError(
                f"lora {name!r}: there is no {folder / file}; give a folder with {CONFIG} and {WEIGHTS}, or "
                "a Hugging Face id whose files are in the cache"
            )


def load_lora(
    name: str,
    path: str | Path,
    config: PreTrainedConfig,
    number: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LoraWeights:
    """Load LoRA weights made for the model of `config`, as safetensors; no code of the folder is run.

    Raises:
        ModelNotFoundError: no such folder, or a file is missing.
        UnsupportedModelError: peft is not installed, or they are no plain LoRA or do not fit.
    """
    folder = resolved_folder(path)
    check_files(name, folder)
    with quiet_transformers():
        skeleton, weights = _loaded_skeleton(name, folder, config)
    head = skeleton.get_output_embeddings()
    for module_name, module in skeleton.named_modules():
        if hasattr(module, "lora_A"):
            _check_layer(name, module_name, module, head)
    parts = {
        module_name: _part(name, module_name, module, weights, dtype=dtype, device=device)
        for module_name, module in skeleton.named_modules()
        if hasattr(module, "lora_A")
    }
    placed = {
        f"{PREFIX}{module_name}.{half}.weight" for module_name in parts for half in ("lora_A", "lora_B")
    }
    for key in weights.keys() - placed:
        raise UnsupportedModelError(f"lora {name!r} does not fit the model: it has no place for {key}")
    return LoraWeights(name, str(folder), number, parts)


def _loaded_skeleton(name: str, folder: Path, own: PreTrainedConfig) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model without weights of its own, into which peft has put the LoRA layers, and their weights."""
    try:
        from peft import LoraConfig, PeftConfig, PeftModel, load_peft_weights
    except ImportError as error:
        raise UnsupportedModelError("LoRA weights need peft; pip install 'logprobe[peft]'") from error
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(own)
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        skeleton = auto.from_config(config, attn_implementation="eager")
    _check_kind(name, folder)
    try:
        settings = PeftConfig.from_pretrained(str(folder))
        _check_config(name, settings, LoraConfig)
        _check_patterns(name, settings, [module_name for module_name, _ in skeleton.named_modules()])
        wrapped = PeftModel.from_pretrained(
            skeleton, str(folder), config=settings, low_cpu_mem_usage=True, torch_device="cpu"
        )
        return wrapped.get_base_model(), load_peft_weights(str(folder), device="cpu")
    except UnsupportedModelError:
        raise
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RuntimeError,
        OSError,
        re.error,
        SafetensorError,
    ) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(f"lora {name!r} does not fit the model: {reason:.300}") from error


def _check_kind(name: str, folder: Path) -> None:
    """Refuse another method before peft reads a configuration that it would only warn of."""
    try:
        kind = json.loads((folder / CONFIG).read_bytes()).get("peft_type")
    except (ValueError, AttributeError) as error:
        raise UnsupportedModelError(f"lora {name!r}: {CONFIG} is no JSON object") from error
    if kind != "LORA":
        raise UnsupportedModelError(f"lora {name!r} is {kind}; only LoRA is known")


def _check_config(name: str, config: Any, lora: type) -> None:
    if not isinstance(config, lora):
        raise UnsupportedModelError(f"lora {name!r} is {config.peft_type}; only LoRA is known")
    for option, neutral in NEUTRAL.items():
        if getattr(config, option, neutral[0]) not in neutral:
            raise UnsupportedModelError(
                f"lora {name!r} uses {option}, which is more than a product of two matrices; merge it "
                "into the model instead"
            )


def _check_patterns(name: str, config: Any, module_names: list[str]) -> None:
    """Try the configuration's regular expressions in a process that can be ended: some never come to an end.

    peft matches them against the names of the model's modules.
    """
    given = (config.target_modules, config.exclude_modules, config.layers_pattern)
    patterns = [pattern for pattern in given if isinstance(pattern, str)]
    patterns += [*(config.rank_pattern or ()), *(config.alpha_pattern or ())]
    if not any(set(pattern) & set("*+{") for pattern in patterns):
        return
    asked = json.dumps([patterns, module_names])
    try:
        subprocess.run(  # noqa: S603 - our own program; the patterns are its input
            [sys.executable, "-I", "-c", TRY_PATTERNS],
            input=asked,
            text=True,
            timeout=PATTERN_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UnsupportedModelError(
            f"lora {name!r}: its patterns take longer than {PATTERN_LIMIT_S} s to match; name the modules"
        ) from error


def _check_layer(name: str, module_name: str, module: Any, head: Any) -> None:
    is_linear = type(module.get_base_layer()) is torch.nn.Linear
    if not is_linear or module is head:
        raise UnsupportedModelError(
            f"lora {name!r} changes {module_name}; only linear layers before the head can be changed"
        )


def _part(
    name: str,
    module_name: str,
    module: Any,
    weights: dict[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> LowRank:
    [key] = module.lora_A
    prefix = f"{PREFIX}{module_name}"
    down, up = weights.get(f"{prefix}.lora_A.weight"), weights.get(f"{prefix}.lora_B.weight")
    if down is None or up is None:
        raise UnsupportedModelError(f"lora {name!r} has no weights for {module_name}")
    with torch.no_grad():
        scaled = up.T * module.scaling[key]
        return LowRank(down.T.to(device, dtype).contiguous(), scaled.to(device, dtype).contiguous())
