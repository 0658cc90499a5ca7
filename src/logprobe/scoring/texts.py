"""Texts → surprisals of their tokens, words, sentences and spans.

Before it: texts. After it: `ScoredText`, which is sliced by characters, words, sentences or patterns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import numpy as np

from logprobe.errors import ParameterError
from logprobe.scoring.scorer import prefix_of
from logprobe.scoring.spans import ScoredText, byte_bounds
from logprobe.scoring.windows import Window, WindowSettings, windows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.values import IntArray
    from logprobe.scoring.score import Score
    from logprobe.scoring.scorer import Scorer
    from logprobe.text.edge import TextEdge


@overload
def surprisal(  # type: ignore[overload-overlap]  # one text comes first, though a str is a sequence of them
    llm: Scorer,
    texts: str,
    *,
    bos: bool | None = ...,
    window: int | None = ...,
    stride: int | None = ...,
) -> ScoredText: ...
@overload
def surprisal(
    llm: Scorer,
    texts: Sequence[str],
    *,
    bos: bool | None = ...,
    window: int | None = ...,
    stride: int | None = ...,
) -> list[ScoredText]: ...
def surprisal(
    llm: Scorer,
    texts: str | Sequence[str],
    *,
    bos: bool | None = None,
    window: int | None = None,
    stride: int | None = None,
) -> ScoredText | list[ScoredText]:
    """Score every token of a text, or of many texts at once, with ranks and entropies; nats.

    Args:
        llm: the model, such as `llm.with_lora(name)`.
        texts: one or many, of any length: what the context cannot hold is scored in sliding windows.
        bos: put BOS (EOS where the model has none) before each text, so that its first token is scored too,
            or do not; None: as its tokenizer does.
        window: tokens a window; the default is the model's context.
        stride: tokens from one window to the next; the default is half a window.

    Raises:
        ParameterError: a text that cannot be encoded, a window or stride that cannot be used.
        BatchError: some texts failed.
    """
    settings = WindowSettings.of(llm, window=window, stride=stride, bos=bos)
    many = [texts] if isinstance(texts, str) else texts
    prefix = prefix_of(llm.text, bos)
    ids = [np.concatenate([prefix, _encoded(llm.text, text, number)]) for number, text in enumerate(many)]
    cuts = [list(windows([one], settings.window, settings.stride)) for one in ids]
    pairs = [_pair(window) for cut in cuts for window in cut]
    scores = iter(llm.score(pairs, entropy=True))
    scored = [
        _scored(llm.text, text, one, len(prefix), [next(scores) for _ in cut])
        for text, one, cut in zip(many, ids, cuts, strict=True)
    ]
    return scored[0] if isinstance(texts, str) else scored


def _encoded(edge: TextEdge, text: str, number: int) -> IntArray:
    try:
        return edge.encode(text, add_special_tokens=False)
    except ParameterError as error:
        raise ParameterError("texts", f"number {number} {str(error).removeprefix('prompt: ')}") from error


def _pair(window: Window) -> tuple[IntArray, IntArray]:
    return window.token_ids[: window.first_scored], window.token_ids[window.first_scored :]


def _scored(edge: TextEdge, text: str, ids: IntArray, num_prefix: int, scores: list[Score]) -> ScoredText:
    own = ids[num_prefix:]
    pieces = [edge.vocabulary.token_bytes(token_id) for token_id in own.tolist()]
    data = b"".join(pieces)
    if data != text.encode():  # a normaliser's changes: the text is then the one that the tokens spell
        text = data.decode("utf-8", "surrogateescape")
        if "\udc80" <= max(text, default="") <= "\udcff":
            raise ParameterError(
                "texts", "the model's tokenizer makes of one what is no text; score it by tokens"
            )
    num_unscored = 0 if num_prefix else min(len(own), 1)
    columns = {
        name: [value for score in scores for value in getattr(score, name) or ()]
        for name in ("token_logprobs", "ranks", "entropy")
    }
    return ScoredText(
        text=text,
        token_ids=own,
        byte_bounds=byte_bounds(pieces),
        logprobs=np.array([np.nan] * num_unscored + columns["token_logprobs"], np.float64),
        ranks=np.array([0] * num_unscored + columns["ranks"], np.int64),
        entropy=np.array([np.nan] * num_unscored + columns["entropy"], np.float64),
        bos_token_id=int(ids[0]) if num_prefix else None,
    )
