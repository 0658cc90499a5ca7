"""Load LoRA adapters: low-rank matrices (Hu et al. 2021), DoRA magnitudes (Liu et al. 2024) and biases.

peft reads the configuration and matches names, patterns and shapes against the model on the meta device.
Parts that depend on the base model's weights (DoRA norms, replaced biases) are computed by `bound`, once
the decoder is known.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from logprobe.errors import ModelNotFoundError, UnsupportedModelError
from logprobe.models.cache import checksums_of, listed_version
from logprobe.models.quiet import quiet_transformers
from logprobe.models.resolution import looks_like_hub_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from transformers import PreTrainedConfig

    from logprobe.kernels.layers.forms import PanelWeights

PREFIX = "base_model.model."  # peft's prefix of module names
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's file names
PATTERN_LIMIT_S = 10
PIECE_NUMBERS = 1 << 22  # weights of a matrix held as float64 at a time
MAX_ID = 2**31 - 1  # largest signed 32-bit integer
# Program that matches patterns; invalid patterns are skipped here and reported by peft.
TRY_PATTERNS = """
import contextlib, json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    with contextlib.suppress(re.error, RecursionError):
        for name in names:
            re.fullmatch(pattern, name), re.match(rf"(.*\\.)?({pattern})$", name)
"""
# peft options that are not supported, with the values that turn them off.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "ensure_weight_tying": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
}
MATRICES = (".lora_A.weight", ".lora_B.weight")
EMBEDDING_MATRICES = (".lora_embedding_A", ".lora_embedding_B")
SUFFIXES = (
    *MATRICES,
    *EMBEDDING_MATRICES,
    ".lora_B.bias",
    ".lora_magnitude_vector",
    ".base_layer.weight",
    ".base_layer.bias",
    ".weight",
    ".bias",
)
LORA_KINDS = ("lora_A", "lora_embedding_A")  # attributes of a targeted module
MERGE = "merge it into the model instead (merge_and_unload)"
MAX_NAMES = 3  # limit on the tensor names listed in a message


@dataclass(frozen=True, eq=False)
class Dense:
    """A full matrix that replaces a module's weight."""

    values: torch.Tensor  # (inputs, outputs)

    @property
    def matrices(self) -> tuple[torch.Tensor, ...]:
        """The matrices by which an input is multiplied, in order."""
        return (self.values,)

    @cached_property
    def panels(self) -> tuple[PanelWeights, ...]:
        """The matrices packed for the CPU kernels; empty if they have no inputs."""
        return _packed(self.matrices)


@dataclass(frozen=True, eq=False)
class LowRank:
    """The part of a LoRA adapter for one linear layer or embedding.

    For a layer with the output P + b, where P is the product of its weight and the input x, the part adds
    `x @ down @ up + gain * (P + b) + shift`. For an embedding, x is a one-hot row per token.
    """

    down: torch.Tensor  # (in_features, rank)
    up: torch.Tensor  # (rank, out_features), multiplied by the scale
    gain: torch.Tensor | None = None  # (out_features,), DoRA's magnitude / norm - 1
    shift: torch.Tensor | None = None  # (out_features,)
    weight: Dense | None = None  # replaces the layer's weight; P + b is then x @ weight

    @property
    def matrices(self) -> tuple[torch.Tensor, ...]:
        """The matrices by which an input is multiplied, in order."""
        return (self.down, self.up)

    @cached_property
    def panels(self) -> tuple[PanelWeights, ...]:
        """The matrices packed for the CPU kernels; empty if the rank is 0."""
        return _packed(self.matrices)

    @cached_property
    def last(self) -> Dense:
        """The matrix `up`, by which an embedding multiplies the rows that it looks up in `down`."""
        return Dense(self.up)


def _packed(matrices: tuple[torch.Tensor, ...]) -> tuple[PanelWeights, ...]:
    from logprobe.kernels.arrays import as_array
    from logprobe.kernels.layers.forms import pack_floats

    return tuple(pack_floats(as_array(matrix.T)) for matrix in matrices) if matrices[-1].shape[0] else ()


@dataclass(frozen=True, slots=True, eq=False)
class OwnValues:
    """Values in an adapter whose effect on a module depends on the module's own weights."""

    bias: torch.Tensor | None = None  # (out_features,), replaces the module's bias
    magnitude: torch.Tensor | None = None  # (out_features,), DoRA's magnitude


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoraWeights:
    """A loaded LoRA adapter, which is freed when neither a request nor the engine refers to it."""

    name: str
    path: str  # with links resolved
    number: int  # load number; loading a name again gives a new one, which separates cache entries
    parts: dict[str, LowRank]  # by full module name
    own_values: dict[str, OwnValues] = field(default_factory=dict)  # by full module name
    embedding: str | None = None  # name of the model's input embedding
    head: str | None = None  # name of the model's output head

    @property
    def changes_head(self) -> bool:
        """True if the adapter changes the output head."""
        return self.head in self.parts


class OwnLayer(Protocol):
    """Access to the weights of a module in the base model, provided by the decoder."""

    @property
    def bias(self) -> torch.Tensor | None:
        """The module's bias, (out_features,); None if it has none."""

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Return rows [start, end) of the matrix; a row is an output of a linear layer or a token."""


def bound(lora: LoraWeights, own_layer: Callable[[str], OwnLayer]) -> dict[str, LowRank]:
    """Return an adapter's parts by module name, adjusted to the base model (DoRA norms, replaced biases)."""
    parts = dict(lora.parts)
    for name, values in lora.own_values.items():
        parts[name] = _bound_part(parts[name], values, own_layer(name), is_embedding=name == lora.embedding)
    return parts


def _bound_part(part: LowRank, values: OwnValues, own: OwnLayer, *, is_embedding: bool) -> LowRank:
    if part.weight is not None and _is_same(part.weight, own, is_embedding=is_embedding):
        part = replace(part, weight=None)
    factor = None
    if values.magnitude is not None:
        factor = (values.magnitude.double() / _norms(part, own, is_embedding=is_embedding)).to(part.up.dtype)
    old, new = own.bias, values.bias
    if new is None:
        new = old
    shift = part.shift
    if new is not None:
        shift = new if shift is None else shift + new
    if old is not None and part.weight is None:
        assert shift is not None
        shift = shift - (old if factor is None else factor * old)
    if factor is None:
        return replace(part, shift=shift)
    return replace(part, up=part.up * factor, gain=factor - 1, shift=shift)


def _is_same(weight: Dense, own: OwnLayer, *, is_embedding: bool) -> bool:
    """Return True if a replacement matrix equals the module's weight; peft saves copies of some weights."""
    import torch

    values = weight.values if is_embedding else weight.values.T
    step = max(1, PIECE_NUMBERS // values.shape[1])
    starts = range(0, len(values), step)
    return all(
        torch.equal(own.rows(start, min(start + step, len(values))), values[start : start + step])
        for start in starts
    )


def _norms(part: LowRank, own: OwnLayer, *, is_embedding: bool) -> torch.Tensor:
    """Return the norm of the weight merged with the adapter, per output, (out_features,) float64."""
    import torch

    num_rows = len(part.down) if is_embedding else part.up.shape[1]
    step = max(1, PIECE_NUMBERS // (part.up.shape[1] if is_embedding else len(part.down)))
    squares = torch.zeros(part.up.shape[1], dtype=torch.float64, device=part.up.device)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        added = part.down[rows] @ part.up if is_embedding else (part.down @ part.up[:, rows]).T
        if part.weight is None:
            base = own.rows(rows.start, rows.stop)
        else:
            base = part.weight.values[rows] if is_embedding else part.weight.values[:, rows].T
        merged = base.double() + added.double()
        if is_embedding:
            squares += merged.square().sum(0)
        else:
            squares[rows] = merged.square().sum(1)
    return squares.sqrt()


def stable_id(name: str) -> int:
    """Return an id in [1, 2**31 - 1] for an adapter name; it is the same in every process."""
    digest = hashlib.shake_128(name.encode("utf-8", "surrogatepass")).digest(4)
    return int.from_bytes(digest, "big") % (MAX_ID - 1) + 1


def resolved_folder(path: str | Path) -> Path:
    """Return the folder of an adapter, with links resolved: a local folder, or a hub id's in the cache."""
    folder = Path(path).expanduser()
    if not folder.is_dir() and looks_like_hub_id(str(path)):
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(str(path), CONFIG)
        if isinstance(config, str):
            folder = Path(config).parent
    return folder.resolve()


def lora_version(folder: Path) -> str:
    """Return an adapter's version: `sha256:` and the SHA-256 of what `sha256sum adapter_*` prints.

    Raises:
        UnsupportedModelError: the files cannot be read.
    """
    files = sorted(path for path in folder.glob("adapter_*") if path.is_file())
    try:
        digests = checksums_of(files)
    except OSError as error:
        reason = error.strerror or error
        raise UnsupportedModelError(f"{folder}: cannot be read ({reason}); check its permissions") from error
    return listed_version(files, digests)


def check_files(name: str, folder: Path) -> None:
    """Check that a folder has an adapter's configuration and weights.

    Raises:
        ModelNotFoundError: one of the two files is missing.
    """
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise ModelNotFoundError(
                f"lora {name!r}: {folder / file} does not exist; give a folder with {CONFIG} and {WEIGHTS}, "
                "or a Hugging Face id whose files are in the cache"
            )


def load_lora(
    name: str,
    path: str | Path,
    config: PreTrainedConfig,
    number: int = 0,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LoraWeights:
    """Load a LoRA adapter for the model of `config` from safetensors; no code in the folder is executed.

    `dtype` is float32 if None.

    Raises:
        ModelNotFoundError: the folder or a file is missing.
        UnsupportedModelError: peft is not installed, or the adapter uses an unsupported option or does not
            match the model.
    """
    import torch

    folder = resolved_folder(path)
    check_files(name, folder)
    with quiet_transformers():
        skeleton, weights, is_tied = _loaded_skeleton(name, folder, config)
    file = _File(name, weights, dtype or torch.float32, torch.device(device))
    modules = dict(skeleton.named_modules())
    ends = (skeleton.get_input_embeddings(), skeleton.get_output_embeddings())
    embedding, head = (
        next((own_name for own_name, module in modules.items() if module is end), None) for end in ends
    )
    lora = LoraWeights(name, str(folder), number, {}, {}, embedding, head)
    for module_name, module in modules.items():
        if file.has_any(module_name) or any(getattr(module, kind, None) for kind in LORA_KINDS):
            file.add_part_(lora, module_name, module)
    file.check_used()
    if is_tied:
        _tie_(lora, modules)
    return lora


def _tie_(lora: LoraWeights, modules: dict[str, Any]) -> None:
    """If a base matrix is saved for only one of two tied modules, apply it to the other as well."""
    if lora.embedding is None or lora.head is None:
        return
    for name, other in ((lora.embedding, lora.head), (lora.head, lora.embedding)):
        part = lora.parts.get(name)
        is_base = not hasattr(modules[name], "modules_to_save")
        if part is not None and part.weight is not None and is_base and other not in lora.parts:
            values = part.weight.values.T.contiguous()
            lora.parts[other] = LowRank(values[:, :0], values[:0], weight=Dense(values))
            lora.own_values[other] = OwnValues()


class _File:
    """The tensors in an adapter file, each of which must be used for one module."""

    def __init__(
        self, name: str, weights: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._name, self._weights = name, weights
        self._dtype, self._device = dtype, device
        self._unused = set(weights)
        self._owners = {_owner(key.removeprefix(PREFIX)) for key in weights}

    def has_any(self, module_name: str) -> bool:
        """Return True if the file has a tensor for the module."""
        return module_name in self._owners

    def add_part_(self, lora: LoraWeights, module_name: str, module: Any) -> None:
        """Add the tensors for a module to `lora`."""
        import torch

        is_embedding = module_name == lora.embedding
        is_wrapped = hasattr(module, "get_base_layer")
        base = module.get_base_layer() if is_wrapped else getattr(module, "original_module", module)
        is_linear = type(base) is torch.nn.Linear
        if not (is_linear or (is_embedding and isinstance(base, torch.nn.Embedding))):
            raise UnsupportedModelError(
                f"lora {self._name!r}: changes {module_name}, but only linear layers, the input embedding "
                f"and the output head are supported; {MERGE}"
            )
        down, up, shift = self._low_rank(module_name, module, is_embedding=is_embedding)
        if down is None or up is None:
            num_outputs, num_inputs = reversed(base.weight.shape) if is_embedding else base.weight.shape
            down, up = self._place(torch.zeros(num_inputs, 0)), self._place(torch.zeros(0, num_outputs))
        inner = f"{module_name}.base_layer" if is_wrapped else module_name
        bias = self._take(f"{inner}.bias") if is_linear and base.bias is not None else None
        magnitude = self._take(f"{module_name}.lora_magnitude_vector")
        is_end = is_embedding or module_name == lora.head
        weight = self._take(f"{inner}.weight") if is_end else None
        if weight is not None and not is_embedding:
            weight = weight.T.contiguous()
        dense = None if weight is None else Dense(weight)
        lora.parts[module_name] = LowRank(down, up, shift=shift, weight=dense)
        if bias is not None or magnitude is not None or dense is not None:
            lora.own_values[module_name] = OwnValues(bias, magnitude)

    def _low_rank(
        self, module_name: str, module: Any, *, is_embedding: bool
    ) -> tuple[torch.Tensor | None, ...]:
        """Return (down, up times the scale, LoRA bias times the scale); each is None if there is none."""
        names = EMBEDDING_MATRICES if is_embedding else MATRICES
        [key] = getattr(module, LORA_KINDS[is_embedding], None) or [None]
        if key is None:
            return None, None, None
        down, up = (self._take(f"{module_name}{name}") for name in names)
        shift = self._take(f"{module_name}.lora_B.bias") if module.lora_bias[key] else None
        lacks_shift = module.lora_bias[key] and shift is None
        lacks_magnitude = module.use_dora[key] and not self._has(f"{module_name}.lora_magnitude_vector")
        if down is None or up is None or lacks_shift or lacks_magnitude:
            raise UnsupportedModelError(
                f"lora {self._name!r}: lacks weights of {module_name}; {listed_names(self._weights)}; save "
                "it again with peft"
            )
        scale = module.scaling[key]
        return down.T.contiguous(), (up.T * scale).contiguous(), None if shift is None else shift * scale

    def check_used(self) -> None:
        """Raise `UnsupportedModelError` if a tensor was not used for any module."""
        for key in sorted(self._unused):
            raise UnsupportedModelError(
                f"lora {self._name!r}: does not match the model, which has no weight for {key}; {MERGE}"
            )

    def _take(self, *names: str) -> torch.Tensor | None:
        for name in names:
            if (weight := self._weights.get(f"{PREFIX}{name}")) is not None:
                self._unused.discard(f"{PREFIX}{name}")
                return self._place(weight)
        return None

    def _place(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self._device, self._dtype)

    def _has(self, name: str) -> bool:
        return f"{PREFIX}{name}" in self._weights


def _owner(key: str) -> str:
    """Return the name of the module that the tensor `key` belongs to."""
    suffix = next((suffix for suffix in SUFFIXES if key.endswith(suffix)), "")
    return key.removesuffix(suffix)


def listed_names(names: Iterable[str]) -> str:
    """Format the names of a file's tensors, at most `MAX_NAMES`, for an error message."""
    ordered = sorted(names)
    more = f" and {len(ordered) - MAX_NAMES} more" if len(ordered) > MAX_NAMES else ""
    return f"the file has {', '.join(ordered[:MAX_NAMES]) or 'no tensors'}{more}"


def _loaded_skeleton(
    name: str, folder: Path, own: PreTrainedConfig
) -> tuple[Any, dict[str, torch.Tensor], bool]:
    """Return an empty model with peft's LoRA layers, the file's tensors, and True if the head is tied."""
    try:
        from peft import LoraConfig, PeftConfig, PeftModel, load_peft_weights
    except ImportError as error:
        raise UnsupportedModelError("lora: needs peft; pip install 'logprobe[peft]'") from error
    from safetensors import SafetensorError

    from logprobe.models.lazy import empty_model

    skeleton = empty_model(copy.deepcopy(own), attn_implementation="eager")
    _check_kind(name, folder)
    head = skeleton.get_output_embeddings()
    is_tied = head is not None and head.weight is skeleton.get_input_embeddings().weight
    try:
        settings = PeftConfig.from_pretrained(str(folder))
        _check_config(name, settings, LoraConfig)
        _check_patterns(name, settings, [module_name for module_name, _ in skeleton.named_modules()])
        weights = load_peft_weights(str(folder), device="cpu")
        _check_names(name, weights, skeleton)
        wrapped = PeftModel.from_pretrained(
            skeleton, str(folder), config=settings, low_cpu_mem_usage=True, torch_device="cpu"
        )
        return wrapped.get_base_model(), weights, is_tied
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
        raise UnsupportedModelError(f"lora {name!r}: does not match the model: {reason:.300}") from error


def _check_kind(name: str, folder: Path) -> None:
    """Raise `UnsupportedModelError` for adapter types other than LoRA; peft may only warn about them."""
    try:
        kind = json.loads((folder / CONFIG).read_bytes()).get("peft_type")
    except (ValueError, AttributeError) as error:
        raise UnsupportedModelError(f"lora {name!r}: {CONFIG} is not a JSON object") from error
    if kind != "LORA":
        raise UnsupportedModelError(f"lora {name!r}: peft_type is {kind}; only LORA is supported")


def _check_config(name: str, config: Any, lora: type) -> None:
    if not isinstance(config, lora):
        raise UnsupportedModelError(f"lora {name!r}: peft_type is {config.peft_type}; only LORA is supported")
    for option, neutral in NEUTRAL.items():
        if getattr(config, option, neutral[0]) not in neutral:
            raise UnsupportedModelError(f"lora {name!r}: uses {option}, which is not supported; {MERGE}")


def _check_names(name: str, weights: dict[str, torch.Tensor], skeleton: Any) -> None:
    """Raise `UnsupportedModelError` for tensors without peft's names, and for a resized vocabulary."""
    if not all(key.startswith(PREFIX) for key in weights):
        foreign = [key for key in weights if not key.startswith(PREFIX)]
        raise UnsupportedModelError(
            f"lora {name!r}: tensors are not named as peft names them ({PREFIX}...); "
            f"{listed_names(foreign)}; save the weights with peft, or rename them"
        )
    for module_name, module in skeleton.named_modules():
        if module not in {skeleton.get_input_embeddings(), skeleton.get_output_embeddings()}:
            continue
        for inner in ("", ".base_layer"):
            weight = weights.get(f"{PREFIX}{module_name}{inner}.weight")
            if weight is not None and len(weight) != len(module.weight):
                raise UnsupportedModelError(
                    f"lora {name!r}: has a resized vocabulary: {module_name} has {len(weight)} rows, the "
                    f"model's {len(module.weight)}; resize the model (resize_token_embeddings) and load that"
                )


def _check_patterns(name: str, config: Any, module_names: list[str]) -> None:
    """Reject regular expressions in the configuration that take too long, by trying them in a subprocess.

    peft matches them against all module names, and catastrophic backtracking might never end.
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
            f"lora {name!r}: its patterns take longer than {PATTERN_LIMIT_S} s to match; list module names"
        ) from error
