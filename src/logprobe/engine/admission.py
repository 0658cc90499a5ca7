"""What a request must satisfy to be accepted: all that can be known to fail is refused here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.config import require
from logprobe.errors import ParameterError, PromptTooLongError

if TYPE_CHECKING:
    from collections.abc import Container

    from logprobe.engine.request import Request
    from logprobe.engine.slots import IntArray


def check_request(request: Request, running: Container[str], *, max_len: int, vocab_size: int) -> None:
    """Raise `ParameterError` where a request can never be served."""
    require(request.request_id not in running, "request_id", f"{request.request_id!r} is running already")
    params = request.params
    num_prompt = len(request.prompt_token_ids)
    require(num_prompt > 0, "prompt", "is empty; give at least one token, such as the model's BOS")
    _check_ids("prompt", request.prompt_token_ids, vocab_size)
    # A prompt that is only scored may hold one token more: its last token is never run.
    limit = max_len if params.max_tokens else max_len + 1
    if num_prompt > limit:
        raise PromptTooLongError(
            "prompt",
            f"has {num_prompt} tokens, but at most {limit} fit (the model's context, max_model_len or "
            "kv_bytes); shorten it or score it in windows",
        )
    _check_given("logprob_token_ids", params.logprob_token_ids, vocab_size)
    _check_given("stop_token_ids", params.stop_token_ids, vocab_size)


def _check_given(name: str, ids: tuple[int, ...] | list[int] | None, vocab_size: int) -> None:
    for token_id in ids or ():
        require(
            0 <= token_id < vocab_size, name, f"id {token_id} lies outside the vocabulary [0, {vocab_size})"
        )


def _check_ids(name: str, ids: IntArray, vocab_size: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)][:1]
    if len(outside):  # numpy takes longer to print an array than all the rest here
        raise ParameterError(name, f"token id {outside} lies outside the vocabulary [0, {vocab_size})")
