"""Reads each layer's sliding window from the attention masks that the model itself makes.

Some families pass a sliding window to attention as an option, some only apply it in the mask, and some pass
an option that contradicts their mask. transformers' own attention follows the mask, so the model runs once
with an attention implementation that records the mask of each layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from logprobe.engine.forward.torch.transformers_attention import check_call, score_rule, sees
from logprobe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.engine.forward.torch.transformers_attention import CurrentStep

NAME = "logprobe_masks"


def noted_mask(*, mask_function: Callable[..., Any], **options: Any) -> torch.Tensor:
    """Implement transformers' mask interface: return a boolean mask with its mask function attached."""
    # Otherwise transformers omits a mask that is purely causal or hides nothing.
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
    """Implement transformers' attention interface: record the layer's mask and score rule, return zeros."""
    step: CurrentStep = module.logprobe_step
    layer = module.layer_idx
    check_call(query, key, options)
    if layer in step.masks:
        raise UnsupportedModelError(f"its layer {layer} calls attention more than once in a forward pass")
    step.masks[layer] = attention_mask
    step.rules[layer], step.key_dims[layer] = score_rule(query, options, None), query.shape[3]
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(NAME, noting_attention)
AttentionMaskInterface.register(NAME, noted_mask)


def window_of(mask: torch.Tensor | None, context_len: int) -> int | None:
    """Return the length of the sliding window in a layer's mask, in tokens; None: causal, no window.

    Raises:
        UnsupportedModelError: the mask is neither causal nor a sliding window.
    """
    if mask is None:
        raise UnsupportedModelError("its attention gets no mask, so tokens attend to later ones")
    if mask.dtype != torch.bool:
        raise UnsupportedModelError("its attention masks are additive (as in ALiBi), not boolean")
    function = getattr(mask, "logprobe_function", None)
    if function is None:
        raise UnsupportedModelError("it makes or changes its attention masks itself")
    own = mask[0, 0].cpu()
    if own.triu(1).any():
        raise UnsupportedModelError("its tokens attend to later ones")
    last = torch.tensor(context_len - 1)
    num_seen = int(_seen(function, last, torch.arange(context_len)).sum())
    window = num_seen if num_seen < context_len else None
    indices = torch.arange(len(own))
    if not torch.equal(own, sees(indices[:, None], indices, window)):
        raise UnsupportedModelError("its masks are neither causal nor a sliding window")
    _check_rows(function, window, context_len)
    return window


def _check_rows(function: Callable[..., Any], window: int | None, context_len: int) -> None:
    """Check the mask in rows just below, at and beyond the window's length, and in the last row."""
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
    """Evaluate transformers' mask function for query index `row` and key indices `columns`."""
    first = torch.tensor(0)
    try:
        seen: torch.Tensor = function(first, first, row, columns)
    except IndexError as error:
        raise UnsupportedModelError("its masks depend on the tokens, not only on their positions") from error
    return seen.expand(len(columns))
