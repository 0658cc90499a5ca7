"""Load LoRA adapters: low-rank matrices (Hu et al. 2021), DoRA magnitudes (Liu et al. 2024) and biases.

Adapters have peft's file format, but peft is not needed: `_Config` is an adapter's configuration, and `_File`
matches an adapter's tensors with the modules of the model. Parts that depend on the base model's weights
(DoRA norms, replaced biases) are computed by `bound`, once the decoder is known.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
import numpy as np
import regex

from logprobe.errors import ModelNotFoundError, UnsupportedModelError, in_one_line
from logprobe.models.cache import checksums_of, listed_version
from logprobe.models.resolution import looks_like_hub_id
from logprobe.models.safetensors_files import tensors_of
from logprobe.models.sources import host_array

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from numpy.typing import NDArray

    from logprobe.kernels.arrays import Array
    from logprobe.kernels.layers.forms import PanelWeights

PREFIX = "base_model.model."  # peft's prefix of module names
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's file names
PATTERN_LIMIT_S = 10  # of all patterns of an adapter together
PIECE_NUMBERS = 1 << 22  # weights of a matrix held as float64 at a time
MAX_ID = 2**31 - 1  # largest signed 32-bit integer
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
MAGNITUDE, LORA_BIAS = ".lora_magnitude_vector", ".lora_B.bias"
SUFFIXES = (
    *MATRICES,
    *EMBEDDING_MATRICES,
    LORA_BIAS,
    MAGNITUDE,
    ".base_layer.weight",
    ".base_layer.bias",
    ".weight",
    ".bias",
)
ALL_LINEAR = "all-linear"  # peft's name for all linear layers except the output head
MERGE = "merge it into the model instead (merge_and_unload)"
MAX_NAMES = 3  # limit on the tensor names listed in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelModules:
    """The modules of a model that an adapter may change, by full name in transformers' module."""

    linear: Mapping[str, tuple[int, int]]  # (outputs, inputs) of each linear layer
    biased: Collection[str]  # linear layers with a bias
    embedding: str  # the input embedding
    embedding_shape: tuple[int, int]  # (tokens, width)
    head: str | None  # the output head, which is one of `linear`
    is_tied: bool  # the output head has the weight of the embedding


@dataclass(frozen=True, eq=False)
class Dense:
    """A full matrix that replaces a module's weight."""

    values: Any  # (inputs, outputs) array; a tensor for decoders that compute with tensors

    @property
    def matrices(self) -> tuple[Any, ...]:
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
    `x @ down @ up + gain * (P + b) + shift`. For an embedding, x is a one-hot row per token. Values are
    float32 arrays; `mapped` makes tensors of them for decoders that compute with tensors.
    """

    down: Any  # (in_features, rank)
    up: Any  # (rank, out_features), multiplied by the scale
    gain: Any = None  # (out_features,), DoRA's magnitude / norm - 1; None: no DoRA
    shift: Any = None  # (out_features,); None: no shift
    weight: Dense | None = None  # replaces the layer's weight; P + b is then x @ weight

    @property
    def matrices(self) -> tuple[Any, ...]:
        """The matrices by which an input is multiplied, in order."""
        return (self.down, self.up)

    @cached_property
    def panels(self) -> tuple[PanelWeights, ...]:
        """The matrices packed for the CPU kernels; empty if the rank is 0."""
        return _packed(self.matrices)

    @cached_property
    def last(self) -> Dense:
        """The second factor, `up`, as a dense weight.

        For an embedding, the first factor is a row lookup in `down`, not a product.
        """
        return Dense(self.up)

    def mapped(self, convert: Callable[[Array], Any]) -> LowRank:
        """Return the part with `convert` applied to all values."""
        down, up = convert(self.down), convert(self.up)
        gain, shift = (None if one is None else convert(one) for one in (self.gain, self.shift))
        weight = None if self.weight is None else Dense(convert(self.weight.values))
        return LowRank(down, up, gain, shift, weight)


def _packed(matrices: tuple[Array, ...]) -> tuple[PanelWeights, ...]:
    from logprobe.kernels.layers.forms import pack_floats

    return tuple(pack_floats(matrix.T) for matrix in matrices) if matrices[-1].shape[0] else ()


@dataclass(frozen=True, slots=True, eq=False)
class OwnValues:
    """Values in an adapter whose effect on a module depends on the module's own weights."""

    bias: Array | None = None  # (out_features,), replaces the module's bias
    magnitude: Array | None = None  # (out_features,), DoRA's magnitude


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
    def bias(self) -> Any:
        """The module's bias, (out_features,) array or tensor; None if it has none."""

    def rows(self, start: int, end: int) -> Any:
        """Return rows [start, end) of the matrix: one per output of a linear layer, or per embedded token."""


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
        norms = _norms(part, own, is_embedding=is_embedding)
        factor = (values.magnitude.astype(np.float64) / norms).astype(np.float32)
    old = None if own.bias is None else host_array(own.bias).astype(np.float32, copy=False)
    new = values.bias
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
    values = weight.values if is_embedding else weight.values.T
    step = max(1, PIECE_NUMBERS // values.shape[1])
    starts = range(0, len(values), step)
    return all(
        np.array_equal(_rows(own, start, min(start + step, len(values))), values[start : start + step])
        for start in starts
    )


def _norms(part: LowRank, own: OwnLayer, *, is_embedding: bool) -> NDArray[np.float64]:
    """Return the norm of the weight merged with the adapter, per output, (out_features,) float64."""
    num_rows = len(part.down) if is_embedding else part.up.shape[1]
    step = max(1, PIECE_NUMBERS // (part.up.shape[1] if is_embedding else len(part.down)))
    squares = np.zeros(part.up.shape[1])
    down, up = part.down.astype(np.float64), part.up.astype(np.float64)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        added = down[rows] @ up if is_embedding else (down @ up[:, rows]).T
        if part.weight is None:
            base = _rows(own, rows.start, rows.stop)
        else:
            base = part.weight.values[rows] if is_embedding else part.weight.values[:, rows].T
        merged = base + added
        if is_embedding:
            squares += np.square(merged).sum(axis=0)
        else:
            squares[rows] = np.square(merged).sum(axis=1)
    return np.sqrt(squares)


def _rows(own: OwnLayer, start: int, end: int) -> Array:
    return host_array(own.rows(start, end))


def stable_id(name: str) -> int:
    """Return an id in [1, 2**31 - 1] for an adapter name; it is the same in every process."""
    digest = hashlib.shake_128(name.encode("utf-8", "surrogatepass")).digest(4)
    return int.from_bytes(digest, "big") % (MAX_ID - 1) + 1


def resolved_folder(path: str | Path) -> Path:
    """Return an adapter's folder with links resolved; `path` is a local folder or a hub id in the cache."""
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


def load_lora(name: str, path: str | Path, modules: ModelModules, number: int = 0) -> LoraWeights:
    """Load a LoRA adapter from safetensors, for a model with these modules.

    Raises:
        ModelNotFoundError: the folder or a file is missing.
        UnsupportedModelError: the adapter uses an unsupported option or does not match the model.
    """
    folder = resolved_folder(path)
    check_files(name, folder)
    config = _read_config(name, folder)
    patterns = _Patterns()
    try:
        targets = _targets(config, modules, patterns)
        file = _File(name, _read_weights(name, folder), config, targets, patterns)
        lora = LoraWeights(name, str(folder), number, {}, {}, modules.embedding, modules.head)
        file.check_sizes(modules)
        file.check_saved(modules)
        for module_name in [*sorted(targets), *sorted(file.owners - targets)]:
            file.add_part_(lora, module_name, modules)
    except (regex.error, RecursionError) as error:
        raise UnsupportedModelError(
            f"lora {name!r}: has an invalid pattern: {error}; correct it in {CONFIG}"
        ) from error
    except TimeoutError as error:
        raise UnsupportedModelError(
            f"lora {name!r}: its patterns take longer than {PATTERN_LIMIT_S} s to match; in {CONFIG}, list "
            "module names instead"
        ) from error
    file.check_used()
    if modules.is_tied:
        _tie_(lora, config)
    return lora


class _Patterns:
    """Matches regular expressions for at most `PATTERN_LIMIT_S` seconds in total.

    Without the limit, catastrophic backtracking might never end, and there may be any number of patterns.
    """

    def __init__(self) -> None:
        self._seconds_left = float(PATTERN_LIMIT_S)
        self._compiled: dict[str, regex.Pattern[str]] = {}

    def match(self, pattern: str, text: str, *, whole: bool = False) -> regex.Match[str] | None:
        """Match the start of a text, or the whole text.

        Raises:
            TimeoutError: the matches have taken too long.
        """
        if self._seconds_left <= 0:
            raise TimeoutError
        start = time.monotonic()
        try:
            if pattern not in self._compiled:
                self._compiled[pattern] = regex.compile(pattern)
            compiled = self._compiled[pattern]
            return (compiled.fullmatch if whole else compiled.match)(text, timeout=self._seconds_left)
        finally:
            self._seconds_left -= time.monotonic() - start


class _Config(msgspec.Struct, kw_only=True):
    """The options in an adapter's configuration that determine its values; defaults are those of peft."""

    r: Annotated[int, msgspec.Meta(gt=0)] = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    rank_pattern: dict[str, Annotated[int, msgspec.Meta(gt=0)]] | None = None
    alpha_pattern: dict[str, float] | None = None

    def rank_and_scale(self, module_name: str, patterns: _Patterns) -> tuple[int, float]:
        """Return the rank of a module's matrices, and the scale of their product."""
        rank = _by_pattern(self.rank_pattern or {}, module_name, self.r, patterns)
        alpha = _by_pattern(self.alpha_pattern or {}, module_name, self.lora_alpha, patterns)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def saves(self, module_name: str) -> bool:
        """Return True if the module's own weights are in the adapter, instead of low-rank matrices."""
        return any(module_name.endswith(end) for end in self.modules_to_save or ())


def _read_config(name: str, folder: Path) -> _Config:
    try:
        content = json.loads((folder / CONFIG).read_bytes())
        kind = content.get("peft_type")
    except (ValueError, AttributeError, RecursionError) as error:
        raise UnsupportedModelError(
            f"lora {name!r}: {CONFIG} is not a JSON object; save it again with peft"
        ) from error
    if kind != "LORA":
        raise UnsupportedModelError(f"lora {name!r}: peft_type is {kind}; only LORA is supported")
    for option, neutral in NEUTRAL.items():
        if content.get(option, neutral[0]) not in neutral:
            raise UnsupportedModelError(f"lora {name!r}: uses {option}, which is not supported; {MERGE}")
    try:
        config = msgspec.convert(content, _Config)
    except msgspec.ValidationError as error:
        raise UnsupportedModelError(
            f"lora {name!r}: {CONFIG}: {in_one_line(error)}; correct the file"
        ) from error
    if not all(map(math.isfinite, (config.lora_alpha, *(config.alpha_pattern or {}).values()))):
        raise UnsupportedModelError(
            f"lora {name!r}: {CONFIG}: lora_alpha must be a finite number; correct the file"
        )
    return config


def _read_weights(name: str, folder: Path) -> dict[str, Array]:
    """Return the tensors in the file without peft's prefix, in float32."""
    from safetensors import SafetensorError

    try:
        stored, _ = tensors_of(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        reason = in_one_line(error)
        raise UnsupportedModelError(
            f"lora {name!r}: {WEIGHTS} cannot be read: {reason}; save it again with peft"
        ) from error
    if not all(key.startswith(PREFIX) for key in stored):
        foreign = [key for key in stored if not key.startswith(PREFIX)]
        raise UnsupportedModelError(
            f"lora {name!r}: tensors are not named as peft names them ({PREFIX}...); "
            f"{listed_names(foreign)}; save the weights with peft, or rename them"
        )
    with np.errstate(over="ignore"):
        return {key.removeprefix(PREFIX): tensor.read().astype(np.float32) for key, tensor in stored.items()}


def _by_pattern(values: Mapping[str, Any], module_name: str, default: Any, patterns: _Patterns) -> Any:
    """Return the value of the first pattern that matches the end of a module's name."""
    for pattern, value in values.items():
        if patterns.match(rf"(.*\.)?({pattern})$", module_name):
            return value
    return default


def _targets(config: _Config, modules: ModelModules, patterns: _Patterns) -> set[str]:
    """Return the names of the modules for which peft makes low-rank matrices."""
    wanted = config.target_modules
    if isinstance(wanted, str) and wanted.lower() == ALL_LINEAR:
        names = {name for name in modules.linear if name != modules.head}
    else:
        every = {*modules.linear, modules.embedding}
        names = {name for name in every if _is_target(config, name, patterns)}
    return {name for name in names if not _is_left_out(config, name, patterns)}


def _is_target(config: _Config, name: str, patterns: _Patterns) -> bool:
    if isinstance(config.target_modules, str):
        return patterns.match(config.target_modules, name, whole=True) is not None
    wanted = config.target_modules or ()
    if name in wanted:
        return True
    if not any(name.endswith(f".{end}") for end in wanted):
        return False
    layers = config.layers_to_transform
    if layers is None or layers == []:
        return True
    parents = config.layers_pattern
    if isinstance(parents, str):
        parents = [parents] if parents else []
    found = None if parents else patterns.match(r".*?\.[^.]*\.(\d+)\.", name)
    for parent in parents or ():
        found = found or patterns.match(rf"(?:^|.*?\.){parent}\.(\d+)\.", name)
    if found is None:
        return False
    if not (found[1] or "").isdecimal():
        raise regex.error("layers_pattern has a group")
    return int(found[1]) in ([layers] if isinstance(layers, int) else layers)


def _is_left_out(config: _Config, name: str, patterns: _Patterns) -> bool:
    excluded = config.exclude_modules or []
    if isinstance(excluded, str):
        if patterns.match(excluded, name, whole=True):
            return True
    elif any(name == end or name.endswith(f".{end}") for end in excluded):
        return True
    saved = config.modules_to_save or ()
    return any(patterns.match(rf"(^|.*\.){module}($|\..*)", name) for module in saved)


def _tie_(lora: LoraWeights, config: _Config) -> None:
    """If a base matrix is saved for only one of two tied modules, apply it to the other as well."""
    if lora.embedding is None or lora.head is None:
        return
    for name, other in ((lora.embedding, lora.head), (lora.head, lora.embedding)):
        part = lora.parts.get(name)
        is_base = not config.saves(name)
        if part is not None and part.weight is not None and is_base and other not in lora.parts:
            values = np.ascontiguousarray(part.weight.values.T)
            lora.parts[other] = LowRank(values[:, :0], values[:0], weight=Dense(values))
            lora.own_values[other] = OwnValues()


class _File:
    """The tensors in an adapter file, each of which must be used for one module."""

    def __init__(
        self,
        name: str,
        weights: dict[str, Array],
        config: _Config,
        targets: Collection[str],
        patterns: _Patterns,
    ) -> None:
        self._name, self._weights, self._config, self._targets = name, weights, config, targets
        self._patterns = patterns
        self._unused = set(weights)
        self.owners = {_owner(key) for key in weights}  # names of the modules that the tensors belong to

    def check_sizes(self, modules: ModelModules) -> None:
        """Raise `UnsupportedModelError` if the vocabulary was resized."""
        sizes = {modules.embedding: modules.embedding_shape[0]}
        if modules.head is not None:
            sizes[modules.head] = modules.linear[modules.head][0]
        for module_name, size in sizes.items():
            for inner in ("", ".base_layer"):
                weight = self._weights.get(f"{module_name}{inner}.weight")
                if weight is not None and len(weight) != size:
                    raise UnsupportedModelError(
                        f"lora {self._name!r}: has a resized vocabulary: {module_name} has {len(weight)} "
                        f"rows, but {size} in the model; resize the model "
                        "(resize_token_embeddings), save it and load it"
                    )

    def add_part_(self, lora: LoraWeights, module_name: str, modules: ModelModules) -> None:
        """Add the tensors for a module to `lora`."""
        is_embedding, is_linear = module_name == lora.embedding, module_name in modules.linear
        if not (is_linear or is_embedding):
            raise UnsupportedModelError(
                f"lora {self._name!r}: changes {module_name}, which is neither a linear layer nor the input "
                f"embedding or output head of the model; {MERGE}"
            )
        if is_embedding:
            num_inputs, num_outputs = modules.embedding_shape
        else:
            num_outputs, num_inputs = modules.linear[module_name]
        is_target = module_name in self._targets
        if is_target:
            down, up, shift = self._low_rank(module_name, num_inputs, num_outputs, is_embedding=is_embedding)
        else:
            down, up = np.zeros((num_inputs, 0), np.float32), np.zeros((0, num_outputs), np.float32)
            shift = None
        inner = f"{module_name}.base_layer" if is_target else module_name
        bias = None
        if is_linear and module_name in modules.biased:
            bias = self._take(f"{inner}.bias", (num_outputs,))
        magnitude = self._take(f"{module_name}{MAGNITUDE}", (num_outputs,))
        is_end = is_embedding or module_name == lora.head
        shape = (num_inputs, num_outputs) if is_embedding else (num_outputs, num_inputs)
        weight = self._take(f"{inner}.weight", shape) if is_end else None
        if weight is not None and not is_embedding:
            weight = np.ascontiguousarray(weight.T)
        dense = None if weight is None else Dense(weight)
        lora.parts[module_name] = LowRank(down, up, shift=shift, weight=dense)
        if bias is not None or magnitude is not None or dense is not None:
            lora.own_values[module_name] = OwnValues(bias, magnitude)

    def _low_rank(
        self, module_name: str, num_inputs: int, num_outputs: int, *, is_embedding: bool
    ) -> tuple[Array, Array, Array | None]:
        """Return `down`, the scaled `up` and the scaled LoRA bias; the bias is None if there is none."""
        rank, scale = self._config.rank_and_scale(module_name, self._patterns)
        names = EMBEDDING_MATRICES if is_embedding else MATRICES
        down = self._take(f"{module_name}{names[0]}", (rank, num_inputs))
        up = self._take(f"{module_name}{names[1]}", (num_outputs, rank))
        has_bias = self._config.lora_bias and not is_embedding
        shift = self._take(f"{module_name}{LORA_BIAS}", (num_outputs,)) if has_bias else None
        lacks_magnitude = self._config.use_dora and f"{module_name}{MAGNITUDE}" not in self._weights
        if down is None or up is None or (has_bias and shift is None) or lacks_magnitude:
            raise self._lacking(module_name)
        factor = np.float32(scale)
        return (
            np.ascontiguousarray(down.T),
            np.ascontiguousarray(up.T * factor),
            None if shift is None else shift * factor,
        )

    def _lacking(self, module_name: str) -> UnsupportedModelError:
        names = listed_names([PREFIX + key for key in self._weights])
        return UnsupportedModelError(
            f"lora {self._name!r}: lacks weights of {module_name}; {names}; save it again with peft"
        )

    def check_saved(self, modules: ModelModules) -> None:
        """Raise `UnsupportedModelError` if the weights of a module in `modules_to_save` are missing."""
        for name in (*modules.linear, modules.embedding):
            if self._config.saves(name) and f"{name}.weight" not in self._weights:
                raise self._lacking(name)
        for end in self._config.modules_to_save or ():
            if not any(owner.endswith(end) for owner in self.owners):
                raise self._lacking(end)

    def check_used(self) -> None:
        """Raise `UnsupportedModelError` if a tensor was not used for any module."""
        for key in sorted(self._unused):
            raise UnsupportedModelError(
                f"lora {self._name!r}: does not match the model, which has no weight for {PREFIX}{key}; "
                f"{MERGE}"
            )

    def _take(self, key: str, shape: tuple[int, ...]) -> Array | None:
        """Return a tensor, which must have this shape; None if the file does not have it."""
        weight = self._weights.get(key)
        if weight is None:
            return None
        if weight.shape != shape:
            raise UnsupportedModelError(
                f"lora {self._name!r}: does not match the model: {key} has the shape {weight.shape}, not "
                f"{shape}; load the adapter with the model that it was trained for"
            )
        self._unused.discard(key)
        return weight


def _owner(key: str) -> str:
    """Return the name of the module that the tensor `key` belongs to."""
    suffix = next((suffix for suffix in SUFFIXES if key.endswith(suffix)), "")
    return key.removesuffix(suffix)


def listed_names(names: Iterable[str]) -> str:
    """Format the names of a file's tensors, at most `MAX_NAMES`, for an error message."""
    ordered = sorted(names)
    more = f" and {len(ordered) - MAX_NAMES} more" if len(ordered) > MAX_NAMES else ""
    return f"the file has {', '.join(ordered[:MAX_NAMES]) or 'no tensors'}{more}"
