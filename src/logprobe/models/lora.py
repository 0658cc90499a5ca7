"""Read a folder of LoRA weights: matrices by module (Hu et al. 2021), DoRA (Liu et al. 2024), biases.

peft reads the configuration and matches names, patterns and shapes against an empty copy of the model. What
depends on the model's own weights (norms of DoRA, biases that are replaced) is computed by `bound`, once the
decoder that runs them is known.
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

import torch

from logprobe.errors import ModelNotFoundError, UnsupportedModelError
from logprobe.kernels.layers.forms import pack_floats
from logprobe.models.cache import checksums_of, listed_version
from logprobe.models.lazy import empty_model
from logprobe.models.quiet import quiet_transformers
from logprobe.models.resolution import looks_like_hub_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from transformers import PreTrainedConfig

    from logprobe.kernels.layers.forms import PanelWeights

PREFIX = "base_model.model."  # that peft writes before the names of modules
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as peft names them
PATTERN_LIMIT_S = 10
PIECE_NUMBERS = 1 << 22  # of a matrix that are in memory at a time as float64
MAX_ID = 2**31 - 1  # that a signed 32-bit number holds
# A pattern that is none is peft's to tell.
TRY_PATTERNS = """
import contextlib, json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    with contextlib.suppress(re.error, RecursionError):
        for name in names:
            re.fullmatch(pattern, name), re.match(rf"(.*\\.)?({pattern})$", name)
"""
# Options of peft that are not supported, with their neutral values.
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
LORA_KINDS = ("lora_A", "lora_embedding_A")  # of a module that is targeted
MERGE = "merge it into the model instead (merge_and_unload)"
MAX_NAMES = 3  # of a file's tensors in a message


@dataclass(frozen=True, eq=False)
class Dense:
    """A matrix that takes the place of a module's own."""

    values: torch.Tensor  # (inputs, outputs)

    @property
    def matrices(self) -> tuple[torch.Tensor, ...]:
        """The factors of its product, in their order."""
        return (self.values,)

    @cached_property
    def panels(self) -> tuple[PanelWeights, ...]:
        """The factors for the kernels of a CPU, packed when first asked for; none without inputs."""
        return _packed(self.matrices)


@dataclass(frozen=True, eq=False)
class LowRank:
    """What LoRA weights make of one linear layer's product P + b with x.

    They add `x @ down @ up + gain * (P + b) + shift`. Of an embedding, x is one row of the identity a token.
    """

    down: torch.Tensor  # (in_features, rank)
    up: torch.Tensor  # (rank, out_features), with the scale in it
    gain: torch.Tensor | None = None  # (out_features,): DoRA's magnitude by the norm, less 1
    shift: torch.Tensor | None = None  # (out_features,)
    weight: Dense | None = None  # takes the place of the layer's own matrix, and P + b is x @ weight

    @property
    def matrices(self) -> tuple[torch.Tensor, ...]:
        """The factors of its product, in their order."""
        return (self.down, self.up)

    @cached_property
    def panels(self) -> tuple[PanelWeights, ...]:
        """The factors for the kernels of a CPU, packed when first asked for; none at rank 0."""
        return _packed(self.matrices)

    @cached_property
    def last(self) -> Dense:
        """`up` alone, for an embedding, whose rows of `down` are looked up."""
        return Dense(self.up)


def _packed(matrices: tuple[torch.Tensor, ...]) -> tuple[PanelWeights, ...]:
    return tuple(pack_floats(matrix.T) for matrix in matrices) if matrices[-1].shape[0] else ()


@dataclass(frozen=True, slots=True, eq=False)
class OwnValues:
    """What LoRA weights hold beside two matrices for a module; its effect depends on the module's own."""

    bias: torch.Tensor | None = None  # (out_features,): takes the place of the module's
    magnitude: torch.Tensor | None = None  # (out_features,): DoRA's


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoraWeights:
    """LoRA weights in the forward pass; they last as long as a request or the engine holds them."""

    name: str
    path: str  # resolved
    number: int  # of the load: a name that is loaded again has another, for the caches to tell
    parts: dict[str, LowRank]  # by the full name of the module
    own_values: dict[str, OwnValues] = field(default_factory=dict)  # of the modules that have any
    embedding: str | None = None  # the name of the model's input embedding
    head: str | None = None  # the name of its output head

    @property
    def changes_head(self) -> bool:
        """Whether the output head runs under them."""
        return self.head in self.parts


class OwnLayer(Protocol):
    """A module's own weights, in a decoder that runs LoRA weights."""

    @property
    def bias(self) -> torch.Tensor | None:
        """(out_features,)."""

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Some rows of its matrix, (rows, columns): of a linear layer by output, of an embedding by token."""


def bound(lora: LoraWeights, own_layer: Callable[[str], OwnLayer]) -> dict[str, LowRank]:
    """The parts of LoRA weights on a model's own: norms and biases are those of the layers that run."""
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
    """Whether a matrix that takes the place of a module's own is the same; peft saves copies of some."""
    values = weight.values if is_embedding else weight.values.T
    step = max(1, PIECE_NUMBERS // values.shape[1])
    starts = range(0, len(values), step)
    return all(
        torch.equal(own.rows(start, min(start + step, len(values))), values[start : start + step])
        for start in starts
    )


def _norms(part: LowRank, own: OwnLayer, *, is_embedding: bool) -> torch.Tensor:
    """Norms of the merged matrix by output, (out_features,) float64."""
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
    """A number for LoRA weights, where an engine wants one: the same in every process, in [1, 2**31 - 1]."""
    digest = hashlib.shake_128(name.encode("utf-8", "surrogatepass")).digest(4)
    return int.from_bytes(digest, "big") % (MAX_ID - 1) + 1


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
        UnsupportedModelError: peft is not installed, or they use what is not supported, or do not fit.
    """
    folder = resolved_folder(path)
    check_files(name, folder)
    with quiet_transformers():
        skeleton, weights, is_tied = _loaded_skeleton(name, folder, config)
    file = _File(name, weights, dtype, torch.device(device))
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
    """Let a base matrix that is saved for one of two tied modules be the other's, too."""
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
    """The tensors of a file of LoRA weights; each belongs to one module."""

    def __init__(
        self, name: str, weights: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._name, self._weights = name, weights
        self._dtype, self._device = dtype, device
        self._unused = set(weights)
        self._owners = {_owner(key.removeprefix(PREFIX)) for key in weights}

    def has_any(self, module_name: str) -> bool:
        """Whether the file has a tensor of a module."""
        return module_name in self._owners

    def add_part_(self, lora: LoraWeights, module_name: str, module: Any) -> None:
        """Add what it holds for a module to LoRA weights."""
        is_embedding = module_name == lora.embedding
        is_wrapped = hasattr(module, "get_base_layer")
        base = module.get_base_layer() if is_wrapped else getattr(module, "original_module", module)
        is_linear = type(base) is torch.nn.Linear
        if not (is_linear or (is_embedding and isinstance(base, torch.nn.Embedding))):
            raise UnsupportedModelError(
                f"lora {self._name!r} changes {module_name}; only linear layers, the input embedding and the "
                f"output head can be changed; {MERGE}"
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
        """Both matrices, the scale in the second, and the bias of `lora_bias`."""
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
                f"lora {self._name!r} lacks weights of {module_name}; {listed_names(self._weights)}; save "
                "it again with peft"
            )
        scale = module.scaling[key]
        return down.T.contiguous(), (up.T * scale).contiguous(), None if shift is None else shift * scale

    def check_used(self) -> None:
        """Refuse tensors that belong to no module that can be changed."""
        for key in sorted(self._unused):
            raise UnsupportedModelError(
                f"lora {self._name!r} does not fit the model: it has no place for {key}; {MERGE}"
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
    """The module that a tensor of a file belongs to."""
    suffix = next((suffix for suffix in SUFFIXES if key.endswith(suffix)), "")
    return key.removesuffix(suffix)


def listed_names(names: Iterable[str]) -> str:
    """Some names of a file's tensors, for a message."""
    ordered = sorted(names)
    more = f" and {len(ordered) - MAX_NAMES} more" if len(ordered) > MAX_NAMES else ""
    return f"the file has {', '.join(ordered[:MAX_NAMES]) or 'no tensors'}{more}"


def _loaded_skeleton(
    name: str, folder: Path, own: PreTrainedConfig
) -> tuple[Any, dict[str, torch.Tensor], bool]:
    """An empty model with peft's LoRA layers, the file's tensors, and whether the model's head is tied."""
    try:
        from peft import LoraConfig, PeftConfig, PeftModel, load_peft_weights
    except ImportError as error:
        raise UnsupportedModelError("LoRA weights need peft; pip install 'logprobe[peft]'") from error
    from safetensors import SafetensorError

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
            raise UnsupportedModelError(f"lora {name!r} uses {option}, which is not supported; {MERGE}")


def _check_names(name: str, weights: dict[str, torch.Tensor], skeleton: Any) -> None:
    """Refuse tensors of another tool's names, and those of a resized vocabulary."""
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
                    f"lora {name!r} has a resized vocabulary: {module_name} has {len(weight)} rows, the "
                    f"model's {len(module.weight)}; resize the model (resize_token_embeddings), and load that"
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
