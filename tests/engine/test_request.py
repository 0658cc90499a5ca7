"""Requests that can never be served are refused before they start, with the sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from logprobe.errors import ParameterError, PromptTooLongError
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_prompt_longer_than_the_pool_is_refused(new_engine: Callable[..., Any]) -> None:
    engine = new_engine(50)
    with pytest.raises(PromptTooLongError, match=r"51 tokens, but at most 50 .*kv_cache_memory_bytes"):
        engine.submit("r", [5] * 51, max_tokens=1)
    output = engine.submit("r", [5] * 50, max_tokens=9, ignore_eos=True)
    engine.run()
    assert len(output.outputs[0].token_ids) == 1
    engine.assert_idle()


def test_a_prompt_longer_than_max_model_len_is_refused(new_engine: Callable[..., Any]) -> None:
    engine = new_engine(100, max_model_len=20)
    with pytest.raises(PromptTooLongError, match="21 tokens, but at most 20"):
        engine.submit("r", [5] * 21, max_tokens=1)
    scored = engine.submit("r", [5] * 21, max_tokens=0, prompt_logprobs=0)
    engine.run()
    assert len(scored.prompt_logprobs) == 21


def test_the_context_bounds_max_model_len(new_engine: Callable[..., Any]) -> None:
    assert new_engine(900, max_model_len=10**9).engine.max_len == 128


@pytest.mark.parametrize("name", ["stop_token_ids", "logprob_token_ids"])
@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_a_named_id_outside_the_vocabulary_is_refused(
    new_engine: Callable[..., Any], name: str, token_id: int
) -> None:
    with raises(ParameterError, parameter=name):
        new_engine().submit("r", [5], logprobs=0, **{name: [5, token_id]})
