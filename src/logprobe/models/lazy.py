"""Run a transformers module without holding its matrices in memory.

A model with 8 billion weights takes 32 GB in float32, but a product needs only a slice of one matrix at a
time. transformers builds the module with placeholders for matrices: a single zero expanded to the matrix's
shape. Inside `LazyModel.reading`, a product with such a matrix reads the values from the source, slice by
slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from logprobe.config import ENGINES
from logprobe.errors import UnsupportedModelError, in_one_line
from logprobe.kernels.placement import as_tensor
from logprobe.models.lora import ModelModules
from logprobe.models.sources import EVERY, RenamedSource, StateSource, made_ahead

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from transformers import PreTrainedConfig

    from logprobe.models.sources import Rows, Source

PIECE_NUMBERS = 1 << 22  # weights converted to float32 at a time; 16 MB fit in the CPU cache
FLOATS = {np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)}
LOAD_ELSEWHERE = f"load it with engine={' or '.join(map(repr, ENGINES))}"
UNUSED = "rotary_emb.inv_freq"  # frequencies in older files, which the module computes itself


@dataclass(frozen=True, slots=True)
class LazyModel:
    """A transformers module, and a source with the values of its parameters by name."""

    module: Any
    source: Source  # of arrays in main memory
    unread: dict[int, str]  # names of the parameters that have not been read, by `id`

    @classmethod
    def of(cls, module: Any) -> LazyModel:
        """Create an instance for a module whose parameters are all in memory."""
        state = {name: one.detach() for name, one in module.named_parameters(remove_duplicate=False)}
        return cls(module, StateSource(state), {})

    def reading(self, *, has_numbers: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which the module can run.

        With `has_numbers=False`, the results of products with unread matrices are zeros.
        """
        return _Reading(self, has_numbers=has_numbers)

    @torch.no_grad()
    def materialise_(self) -> None:
        """Read every unread parameter into memory."""
        for parameter in self.module.parameters():
            if (name := self.unread.pop(id(parameter), None)) is not None:
                value = as_tensor(self.source.read(name))
                parameter.data = value.to(parameter.device, parameter.dtype, copy=True)


class _Reading(TorchFunctionMode):
    """Context in which operators get the values of unread parameters."""

    def __init__(self, model: LazyModel, *, has_numbers: bool) -> None:
        super().__init__()
        self._source, self._unread, self._has_numbers = model.source, model.unread, has_numbers
        self._piece = torch.empty(PIECE_NUMBERS, dtype=torch.float32)

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(map(self._is_unread, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":
            value = func(*args, **kwargs)
            if not isinstance(value, torch.Tensor):  # shape, dtype, device
                return value
        if func is functional.linear and not self._is_unread(args[0]):
            return self._product(*args, **kwargs)
        if func is functional.embedding and len(args) > 1:
            ids, places = torch.unique(args[0], return_inverse=True)
            return func(places, self._read(args[1], ids.numpy()).to(args[1].dtype))
        if func is torch.Tensor.__getitem__:
            return self._read(args[0])[args[1]].to(args[0].dtype)
        return func(*map(self._whole, args), **{name: self._whole(one) for name, one in kwargs.items()})

    def _is_unread(self, value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(map(self._is_unread, value))
        return id(value) in self._unread

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply x (..., inputs) by a weight (outputs, inputs), one slice of outputs at a time."""
        num_outputs, num_inputs = weight.shape
        out = x.new_zeros(*x.shape[:-1], num_outputs)
        if self._has_numbers:
            step = max(1, PIECE_NUMBERS // num_inputs)
            pieces = [slice(start, min(start + step, num_outputs)) for start in range(0, num_outputs, step)]
            reads = [partial(self._read, weight, rows) for rows in pieces]
            made = made_ahead(reads) if len(reads) > 1 else (read() for read in reads)
            for rows, piece in zip(pieces, made, strict=True):
                if piece.dtype != torch.float32:
                    piece = self._piece[: piece.numel()].view(piece.shape).copy_(piece)  # noqa: PLW2901
                out[..., rows] = functional.linear(x, piece)
        return out if bias is None else out + bias

    def _whole(self, value: Any) -> Any:
        """Return an operator's argument, in which each unread parameter is replaced with its values."""
        if isinstance(value, list | tuple):
            return type(value)(map(self._whole, value))
        return self._read(value).to(value.dtype) if id(value) in self._unread else value

    def _read(self, parameter: torch.Tensor, rows: Rows = EVERY) -> torch.Tensor:
        tensor: torch.Tensor = as_tensor(self._source.read(self._unread[id(parameter)], rows))
        return tensor


def check_causal(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModelError` if transformers has no causal language model for `config`."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"model: model_type {config.model_type!r} has no causal language model in transformers; "
            f"{LOAD_ELSEWHERE}, or give a checkpoint with only its language model"
        )


def empty_model(config: PreTrainedConfig, **options: Any) -> Any:
    """Build a causal language model from its configuration on the meta device, without weights.

    Raises:
        UnsupportedModelError: transformers has no such model, or cannot build it.
    """
    from transformers import AutoModelForCausalLM

    check_causal(config)
    auto: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            return auto.from_config(config, **options)
    except Exception as error:  # the model's own code, which may raise anything
        raise UnsupportedModelError(
            f"model: model_type {config.model_type!r} cannot be built by transformers "
            f"({in_one_line(error)}); fix config.json, or {LOAD_ELSEWHERE}"
        ) from error


def modules_of(config: PreTrainedConfig) -> ModelModules:
    """Return the modules that LoRA weights may change in a model with this configuration.

    Raises:
        UnsupportedModelError: for the reasons given in `empty_model`, or the model has no embedding.
    """
    model = empty_model(config, attn_implementation="eager")
    modules = dict(model.named_modules())
    linear = {name: module for name, module in modules.items() if type(module) is nn.Linear}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    embedding, head = (
        next((name for name, module in modules.items() if module is end), None) for end in ends
    )
    if embedding is None or not isinstance(ends[0], nn.Embedding):
        raise UnsupportedModelError(f"model: model_type {config.model_type!r} has no input embedding")
    num_tokens, width = ends[0].weight.shape
    return ModelModules(
        linear={name: (module.out_features, module.in_features) for name, module in linear.items()},
        biased={name for name, module in linear.items() if module.bias is not None},
        embedding=embedding,
        embedding_shape=(num_tokens, width),
        head=head if head in linear else None,
        is_tied=head is not None and ends[1].weight is ends[0].weight,
    )


def lazy_model(
    config: PreTrainedConfig, source: Source, *, dtype: torch.dtype, attn_implementation: str = "eager"
) -> LazyModel | None:
    """Build a model on the CPU whose vectors are in memory and whose matrices are read on demand.

    Return None if only transformers can convert the checkpoint: if it is quantized, or if its tensors are not
    floats with the names and shapes of the module's parameters.

    Raises:
        UnsupportedModelError: for the reasons given in `empty_model`.
    """
    empty = empty_model(config)
    own = _own_names(empty, source)
    if getattr(config, "quantization_config", None) is not None or own is None:
        return None
    source = RenamedSource(source, own)
    first_rows = (source.read(name, slice(1) if shape else EVERY) for name, shape in source.shapes.items())
    if any(row.dtype not in FLOATS for row in first_rows):
        return None
    zero = torch.zeros((), dtype=dtype)
    state = {
        name: zero.expand(shape) if len(shape) > 1 else as_tensor(source.read(name)).to(dtype, copy=True)
        for name, shape in source.shapes.items()
    }
    module = type(empty).from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, attn_implementation=attn_implementation
    )
    module.eval().requires_grad_(requires_grad=False)
    unread = {id(one): name for name, one in module.named_parameters() if one.dim() > 1}
    return LazyModel(module, source, unread)


def _own_names(empty: Any, source: Source) -> Mapping[str, str] | None:
    """Return a map from the names of a module's untied parameters to the names of the source's tensors.

    Return None if names or shapes do not match.
    """
    tied = empty.all_tied_weights_keys
    wanted = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items() if name not in tied}
    for prefix in ("", f"{empty.base_model_prefix}."):
        names = {f"{prefix}{name}": name for name in source.shapes if not name.endswith(UNUSED)}
        twice = {name: names.pop(name) for name in tied if name in names}
        found = {name: source.shapes[own] for name, own in names.items()}
        if found == wanted and all(
            np.array_equal(source.read(own), source.read(names[tied[name]])) for name, own in twice.items()
        ):
            return names
    return None
