"""`ReferenceProof`: verifies decoders against the logits of `reference`, a decoder in NumPy float64.

This needs neither transformers nor a transformers module. CI verifies `reference` against transformers for
every family.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.engine.forward.cpu.linear import matrices_of_parameters
from logprobe.engine.forward.cpu.native_decoder import describe, frequencies
from logprobe.engine.forward.families import FAMILIES
from logprobe.engine.forward.proof import Proof, Reference, special_ids
from logprobe.engine.forward.reference import logits
from logprobe.engine.forward.reference.model import decoder_name
from logprobe.engine.forward.reference.rotary import ORIGINAL_LEN
from logprobe.engine.forward.reference.settings import settings_of
from logprobe.models.experts import with_joined_experts
from logprobe.models.sources import EVERY, RenamedSource

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from logprobe.engine.forward.config import DecoderSpec
    from logprobe.engine.forward.cpu.linear import Matrix
    from logprobe.kernels.arrays import Array
    from logprobe.models.config_files import ModelConfig
    from logprobe.models.sources import Source

# transformers' module name of the decoder, for files whose names leave it out.
DECODERS: Final = {"gpt2": "transformer", "gpt_neox": "gpt_neox"}
# Families whose modules of a kind have biases, whatever the configuration says.
PROJECTION_BIASES: Final = {"gpt2", "phi", "qwen2"}
OUTPUT_BIASES: Final = {"gpt2", "phi"}
MLP_BIASES: Final = {"gpt2", "gpt_neox", "phi"}
NORM_BIASES: Final = {"gpt2", "gpt_neox", "jais2", "phi", "stablelm", "starcoder2"}
HEAD_BIASES: Final = {"phi"}
# Families in which `attention_bias` is not for the output projection.
NO_OUTPUT_BIAS: Final = {"glm", "helium", "seed_oss"}
# Buffers in older files, which the decoder computes itself.
UNUSED: Final = re.compile(r"(rotary_emb\.inv_freq|\.(attn|attention)\.(masked_)?bias)$")


@dataclass(frozen=True, slots=True)
class PlainModel:
    """A model without a transformers module: its configuration, its structure, and its weights."""

    config: ModelConfig
    spec: DecoderSpec
    source: Source  # weights of the decoder and the output head, by name in transformers' module

    @classmethod
    def of(cls, config: ModelConfig, source: Source) -> PlainModel | str:
        """Return a model, or the reason why the native decoder does not support it."""
        family = FAMILIES.get(config.model_type)
        if family is None:
            return f"the model type {config.model_type} is not supported"
        source = with_joined_experts(source, config.model_type)
        names = {name: name for name in source.shapes if UNUSED.search(name) is None}
        try:
            path = decoder_name(names, family)
        except KeyError:
            return "its weights do not have the names of its model type in transformers"
        if not path:
            prefix = DECODERS.get(config.model_type, "model")
            names = {own if own.startswith("lm_head.") else f"{prefix}.{own}": own for own in names}
        spec = describe(config, names)
        if isinstance(spec, str):
            return spec
        parts = (f"{spec.path}.", f"{spec.head}.")
        others = [name for name in names if not name.startswith(parts)]
        if others and path in {"", DECODERS.get(config.model_type, "model")}:
            return f"its tensor {others[0]} is not supported"
        for name in others:  # in a multimodal model, these belong to encoders
            del names[name]
        if wrong := _wrong_biases(config, spec, names):
            return f"its biases do not match its configuration, such as {wrong[0]}"
        head, embedding = f"{spec.head}.weight", f"{spec.path}.{family.embedding}.weight"
        sizes = config.vocab_size, config.hidden_size
        shape = source.shapes[names[embedding]]
        if any(size is not None and size != own for size, own in zip(sizes, shape, strict=True)):
            return f"its embedding has shape {tuple(shape)}, but its configuration says {sizes}"
        if not config.tie_word_embeddings and head not in names:
            return f"its weights lack {head}"
        if config.tie_word_embeddings and head in names:
            if not np.array_equal(source.read(names[head]), source.read(names[embedding])):
                return f"{head} differs from {embedding}, although tie_word_embeddings is set"
            del names[head]
        return cls(config, spec, RenamedSource(source, names))

    def vectors(self) -> dict[str, Array]:
        """Return the biases, norm weights and rotary frequencies, by name."""
        small = [name for name, shape in self.source.shapes.items() if len(shape) == 1]
        settings = settings_of(self.config, np.float32)
        tensors = {name: self.source.read(name).astype(np.float32) for name in small}
        return tensors | frequencies(settings, self.spec.rope_boundary)

    def matrices(self) -> list[Matrix]:
        """Return all matrices; see `matrices_of_parameters`."""
        shapes = {name: shape for name, shape in self.source.shapes.items() if len(shape) > 1}
        family = FAMILIES[self.spec.family]
        tied = {f"{self.spec.path}.{family.embedding}.weight": (f"{self.spec.head}.weight",)}
        if not self.config.tie_word_embeddings:
            tied = {}
        layers = f"{self.spec.path}.{family.layers}."
        transposed = {name for name in shapes if family.is_transposed and name.startswith(layers)}
        return matrices_of_parameters(shapes, tied, transposed)


def _wrong_biases(config: ModelConfig, spec: DecoderSpec, names: Collection[str]) -> list[str]:
    """Return the biases that the configuration requires but `names` lacks, and surplus ones in `names`."""
    kind, family, flags = config.model_type, FAMILIES[config.model_type], config.content
    norms = [family.before_attention, family.after_attention, family.before_mlp, family.after_mlp]
    has = {
        family.projections: kind in PROJECTION_BIASES
        or any(flags.get(key) for key in ("attention_bias", "use_bias", "use_qkv_bias", "qkv_bias")),
        (family.output,): kind in OUTPUT_BIASES
        or bool(flags.get("attention_bias") and kind not in NO_OUTPUT_BIAS)
        or any(flags.get(key) for key in ("use_bias", "attention_out_bias")),
        (*family.gates, family.down): kind in MLP_BIASES
        or any(flags.get(key) for key in ("mlp_bias", "use_bias")),
        tuple(name for name in norms if name is not None): kind in NORM_BIASES,
    }
    modules = [name for group, has_biases in has.items() if has_biases for name in group]
    layers = [f"{spec.path}.{family.layers}.{number}" for number in range(len(spec.rules))]
    wanted = {f"{layer}.{module}" for layer in layers for module in modules}
    if kind in NORM_BIASES:
        wanted.add(f"{spec.path}.{family.last_norm}")
    if kind in HEAD_BIASES:
        wanted.add(spec.head)
    has_weight = {name for name in wanted if f"{name}.weight" in names}  # not with experts or shared norms
    found = {name.removesuffix(".bias") for name in names if name.endswith(".bias")}
    return sorted(has_weight ^ found)


class ReferenceProof(Proof):
    """Runs `reference` to get reference logits."""

    verified_against = "reference"

    def __init__(self, model: PlainModel, *, eos_token_ids: frozenset[int]) -> None:
        config = model.config
        assert config.max_position_embeddings is not None
        assert config.vocab_size is not None
        super().__init__(
            context_len=config.max_position_embeddings,
            rope_boundary=model.spec.rope_boundary,
            dtype="float32",
            vocab_size=config.vocab_size,
            eos_token_ids=eos_token_ids,
        )
        weights = _Weights(model.source)
        special = special_ids(config.content)
        outer = config.rope_parameters or {}
        lengths = {
            part[ORIGINAL_LEN]
            for part in (outer, *outer.values())
            if isinstance(part, dict) and ORIGINAL_LEN in part
        }
        self.references = []
        for start in self._starts(lengths):
            ids = self._probe_ids(special, seed=start)
            numbers = logits(config, weights, ids, start=start, rotary_dtype=np.float32)
            positions = start + np.arange(len(ids))
            self.references.append(
                Reference(ids, positions, numbers.astype(np.float32), self._is_long(start))
            )


class _Weights(Mapping[str, Any]):
    """The arrays of a source by name, which are read when they are indexed."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, name: str) -> _Stored:
        if name not in self._source.shapes:
            raise KeyError(name)
        return _Stored(self._source, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.shapes)

    def __len__(self) -> int:
        return len(self._source.shapes)


@dataclass(frozen=True, slots=True)
class _Stored:
    """An array in a source; indexing reads the selected rows as float32."""

    source: Source
    name: str

    def __len__(self) -> int:
        return self.source.shapes[self.name][0]

    def __getitem__(self, index: slice | int | NDArray[np.int64]) -> NDArray[np.float32]:
        if isinstance(index, int):
            one: NDArray[np.float32] = self[index : index + 1][0]
            return one
        rows = EVERY if isinstance(index, slice) and index == EVERY else index
        return self.source.read(self.name, rows).astype(np.float32, copy=False)
