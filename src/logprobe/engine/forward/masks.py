"""Who sees whom, as the model's own masks have it.

Some families hand a sliding window to their attention as an option, some tell it by the mask alone, and some
hand on an option that their mask does not follow. The mask is what counts in transformers' own attention, so
the model is run once with its masks made, and each layer's window is read from the mask that reaches it.
Before it: the loaded model. After it: the attention rules of every layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from logprobe.engine.forward.attention import check_call, score_rule, sees
from logprobe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.engine.forward.attention import CurrentStep

NAME = "logprobe_masks"


def noted_mask(*, mask_function: Callable[..., Any], **options: Any) -> torch.Tensor:
    """Serve transformers' mask interface: the mask as booleans, and the function that made it beside it."""
    # Else it would be left out where it is plainly causal, or where nothing is hidden at all.
    options["allow_is_causal_skip"] = options["allow_is_bidirectional_skip"] = False
    mask = sdpa_mask(mask_function=mask_function, **options)
    assert mask is not None
    mask.logprobe_function = mask_function  # type: ignore[attr-defined]
    return mask


def noting_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Serve transformers' attention interface: note the layer's mask and rule, and attend to nothing."""
    step: CurrentStep = module.logprobe_step
    layer = module.layer_idx
    check_call(query, key, options)
    if layer in step.masks:
        raise UnsupportedModelError(f"its layer {layer} attends more than once in a forward pass")
    step.masks[layer] = attention_mask
    step.rules[layer], step.key_dims[layer] = score_rule(query, options, None), query.shape[3]
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(NAME, noting_attention)
AttentionMaskInterface.register(NAME, noted_mask)


def window_of(mask: torch.Tensor | None, context_len: int) -> int | None:
    """The sliding window that a layer's mask keeps; None: every token sees all before it.

    Raises:
        UnsupportedModelError: the mask is of another kind.
    """
    if mask is None:
        raise UnsupportedModelError("its attention gets no mask, so that each token sees those after it")
    if mask.dtype != torch.bool:
        raise UnsupportedModelError("its masks add to the scores (as ALiBi does) rather than hide tokens")
    function = getattr(mask, "logprobe_function", None)
    if function is None:
        raise UnsupportedModelError("it makes or changes its masks by itself")
    own = mask[0, 0].cpu()
    if own.triu(1).any():
        raise UnsupportedModelError("its tokens see those after them")
    last = torch.tensor(context_len - 1)
    num_seen = int(_seen(function, last, torch.arange(context_len)).sum())
    window = num_seen if num_seen < context_len else None
    indices = torch.arange(len(own))
    if not torch.equal(own, sees(indices[:, None], indices, window)):
        raise UnsupportedModelError("its masks are neither causal nor a sliding window")
    _check_rows(function, window, context_len)
    return window


def _check_rows(function: Callable[..., Any], window: int | None, context_len: int) -> None:
    """Compare what tokens see, below, at and beyond the window and at the end of the context."""
    near = context_len // 2 if window is None else window
    rows = {0, 1, near - 1, near, near + 1, 2 * near - 1, 2 * near, 2 * near + 1, context_len - 1}
    columns = torch.arange(context_len)
    for row in sorted(row for row in rows if 0 <= row < context_len):
        index = torch.tensor(row)
        if not torch.equal(_seen(function, index, columns), sees(index, columns, window)):
            raise UnsupportedModelError(
                f"its masks are neither causal nor a sliding window (as the token at {row} shows)"
            )


def _seen(function: Callable[..., Any], row: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """What transformers' mask function says of one token and every other, by index."""
    first = torch.tensor(0)
    try:
        seen: torch.Tensor = function(first, first, row, columns)
    except IndexError as error:
        raise UnsupportedModelError("its masks depend on the tokens, not on their places alone") from error
    return seen.expand(len(columns))
