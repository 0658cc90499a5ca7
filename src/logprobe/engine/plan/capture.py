"""`SampleCapture`: the activations that one sample reports, and how far it has reported them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from logprobe.errors import ParameterError, require
from logprobe.records.values import ExpertRoutes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.engine.protocol import ModelShape
    from logprobe.kernels.arrays import Array
    from logprobe.transport.messages import Request


@dataclass(frozen=True, slots=True)
class Tail:
    """Activations of the last token that a sample has run."""

    layers: tuple[int, ...]  # numbers of hidden states
    hidden: Array  # (layers, hidden size) float32
    routes: Array | None  # (expert layers, experts per token)


@dataclass(slots=True, kw_only=True)
class SampleCapture:
    """Activations that a sample reports.

    Row i of a completion's hidden states is the state of the token before token i: token i was drawn from it.
    """

    hidden: tuple[int, ...]  # numbers of hidden states to report
    routes: bool  # report expert routes
    given: Array | None  # (positions, expert layers, experts per token): experts to use; None: the router's
    lens: tuple[int, ...]  # numbers of hidden states from which to predict
    k: int  # alternatives per prediction
    num_prompt: int  # prompt tokens to report: all for the first sample of a request, else 0
    num_done: int = 0  # prompt tokens reported so far
    tail: Tail | None = None

    @classmethod
    def of(cls, request: Request, index: int, shape: ModelShape) -> SampleCapture:
        """Return what sample `index` of a request reports."""
        params, lens = request.params, request.lens
        asked, given = params.return_hidden_states, params.routed_experts
        reports = asked is not None or lens is not None or params.return_routed_experts
        return cls(
            hidden=() if asked is None else layers_of(asked, shape, "return_hidden_states"),
            routes=params.return_routed_experts,
            given=given.array if isinstance(given, ExpertRoutes) else None,
            lens=() if lens is None else layers_of(lens.layers, shape, "layers"),
            k=0 if lens is None else lens.k,
            num_prompt=len(request.prompt_token_ids) if index == 0 and reports else 0,
        )

    def inner(self, shape: ModelShape) -> set[int]:
        """Return the numbers of the hidden states that a step must keep: all but the last layer's."""
        return {*self.hidden, *self.lens} - {shape.num_layers}

    def is_fresh(self, shape: ModelShape) -> bool:
        """Return True if the sample must compute all its tokens itself."""
        return bool(self.inner(shape)) or self.routes or self.given is not None


def layers_of(layers: str | Sequence[int], shape: ModelShape, name: str) -> tuple[int, ...]:
    """Return the numbers, 0 or more, of the hidden states that a request names.

    Raises:
        ParameterError: a layer does not exist, is named twice, or is not reported by the engine; the error's
            parameter is `name`.
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
    require(len(set(found)) == len(found), name, f"names a layer twice (once from the end): {[*layers]}")
    if shape.why_no_layers is not None and set(found) != {last}:
        raise ParameterError(name, f"{shape.why_no_layers}; use 'last' (layer {last})")
    return tuple(found)


def check_capture(request: Request, shape: ModelShape | None, *, max_len: int) -> None:
    """Raise `ParameterError` if an engine with this shape cannot report the activations of a request."""
    params = request.params
    asked = {
        "return_hidden_states": params.return_hidden_states is not None,
        "return_routed_experts": params.return_routed_experts,
        "routed_experts": params.routed_experts is not None,
    }
    name = next((name for name, is_asked in asked.items() if is_asked), "layers")
    require(shape is not None, name, "is not supported by this engine; use the native engine")
    assert shape is not None
    num_prompt = len(request.prompt_token_ids)
    for route in ("return_routed_experts", "routed_experts"):
        is_routed = not asked[route] or shape.why_no_routes is None
        require(is_routed, route, f"is not supported: {shape.why_no_routes}; leave it out")
    own = SampleCapture.of(request, 0, shape)
    if own.given is not None:
        _check_routes(own.given, shape, num_prompt + max(params.max_tokens - 1, 0))
    if not own.num_prompt:
        return
    # Unlike a prompt that is only scored, all tokens are run.
    require(
        num_prompt <= max_len,
        name,
        f"needs {num_prompt} positions for the prompt, but the model has {max_len}; shorten the prompt",
    )


def _check_routes(given: Array, shape: ModelShape, num_positions: int) -> None:
    """Raise `ParameterError` if given routes do not fit the model, or exceed `num_positions` positions."""
    name = "routed_experts"
    want = (shape.num_expert_layers, shape.experts_per_token)
    own = f"has {given.shape[1]} layers with {given.shape[2]} experts per token"
    require(given.shape[1:] == want, name, f"{own}, but the model has {want[0]} layers with {want[1]}")
    highest = int(given.max())
    message = f"names expert {highest}, but the model has {shape.num_experts} per layer"
    require(highest < shape.num_experts, name, message)
    message = f"has {len(given)} positions, but the request runs at most {num_positions} tokens; shorten it"
    require(len(given) <= num_positions, name, message)
