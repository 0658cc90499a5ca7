"""`SampleCapture`: the activations that one sample reports, and how far it has reported them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.engine.protocol import ModelShape
    from logprobe.transport.messages import Request


@dataclass(slots=True, kw_only=True)
class SampleCapture:
    """Activations that a sample reports.

    Row i of a completion's hidden states belongs to the token before token i, from which token i was drawn.
    """

    hidden: tuple[int, ...]  # numbers of hidden states to report
    lens: tuple[int, ...]  # numbers of hidden states from which to predict
    k: int  # alternatives per prediction
    num_prompt: int  # prompt tokens to report: all for the first sample of a request, else 0
    num_done: int = 0  # prompt tokens reported so far
    # numbers of hidden states, and these states of the token run last, (layers, hidden size) float32
    tail: tuple[tuple[int, ...], Any] = ((), None)

    @classmethod
    def of(cls, request: Request, index: int, shape: ModelShape) -> SampleCapture:
        """Return what sample `index` of a request reports."""
        asked, lens = request.params.return_hidden_states, request.lens
        return cls(
            hidden=() if asked is None else layers_of(asked, shape, "return_hidden_states"),
            lens=() if lens is None else layers_of(lens.layers, shape, "layers"),
            k=0 if lens is None else lens.k,
            num_prompt=len(request.prompt_token_ids) if index == 0 else 0,
        )

    def inner(self, shape: ModelShape) -> set[int]:
        """Return the numbers of hidden states that the layers must keep: all but the last one."""
        return {*self.hidden, *self.lens} - {shape.num_layers}


def layers_of(layers: str | Sequence[int], shape: ModelShape, name: str) -> tuple[int, ...]:
    """Return the numbers of the hidden states that a request names, from 0 on.

    Raises:
        ParameterError: there is no such layer, one is named twice, or the engine does not report it; the
            error's parameter is `name`.
    """
    last = shape.num_layers
    if layers == "last":
        return (last,)
    found = []
    for layer in layers:
        assert isinstance(layer, int)
        known = f"must be in [{-last - 1}, {last}], got {layer}; 0 is the embedding, {last} the last state"
        require(-last - 1 <= layer <= last, name, known)
        found.append(layer if layer >= 0 else last + 1 + layer)
    require(len(set(found)) == len(found), name, f"names a layer twice, once from the end: {[*layers]}")
    if shape.why_no_layers is not None and set(found) != {last}:
        raise ParameterError(name, f"{shape.why_no_layers}; use 'last' (layer {last})")
    return tuple(found)


def check_capture(request: Request, shape: ModelShape | None, *, max_len: int) -> None:
    """Raise `ParameterError` if an engine with this shape cannot report the activations of a request."""
    name = "return_hidden_states" if request.params.captures else "layers"
    require(shape is not None, name, "is not supported by this engine; use the native engine")
    assert shape is not None
    SampleCapture.of(request, 0, shape)
    num_prompt = len(request.prompt_token_ids)
    # Unlike a prompt that is only scored, all tokens are run.
    require(
        num_prompt <= max_len,
        name,
        f"needs {num_prompt} positions for the prompt, but the model has {max_len}; shorten the prompt",
    )
