"""transformers' models with all of their arithmetic in float64."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from families.tiny import model_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Widened(TorchFunctionMode):
    """Calls torch with float64 where transformers' modules say float32.

    They do so whatever the dtype of the model: for rotary frequencies and angles, norms, the softmax of
    scores and of routers, and factors of embeddings.
    """

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_float64() -> Iterator[None]:
    """Make what torch computes float64, in code that asks for float32 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)


def exact_model(model: Any, kind: str, special: dict[str, Any]) -> Any:
    """The model that `model_of` makes of the same arguments, and its weights, in float64."""
    # The one says the model's own dtype; the other asks for scores in float32, and checks that they are.
    replaced = {"dtype": "float64", "reorder_and_upcast_attn": False}
    special = special | {name: value for name, value in replaced.items() if name in special}
    with in_float64():
        exact = model_of(kind, **special).double()
        exact.load_state_dict(model.state_dict())
    exact.set_experts_implementation("eager")  # the others compute in 32 or 16 bits only
    return exact


@torch.inference_mode()
def exact_logits(exact: Any, token_ids: Any) -> Any:
    """Logits after each token of a text, (num_tokens, vocabulary) float64."""
    with in_float64():
        logits = exact(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    assert logits.dtype == torch.float64
    return logits.numpy()
