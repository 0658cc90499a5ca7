"""Unusual but legal forms of every field, on every route and layout: what is admitted is also served."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from logprobe.records.rows import KERNEL_EXTRAS
from logprobe.server.openai.bodies import ChatBody, CompletionBody, ResponsesBody
from logprobe.server.openai.fields import SAMPLING_FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server_process import Attacked

LAYOUTS: dict[str, tuple[str, ...]] = {
    "thread": (),
    "process": ("--engine-process",),
    "replicas": ("--data-parallel-size", "2"),
}
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (CompletionBody, {"prompt": "the cat", "max_tokens": 4, "logprobs": 1}),
    "/v1/chat/completions": (
        ChatBody,
        {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4, "logprobs": True},
    ),
    "/v1/responses": (
        ResponsesBody,
        {"input": "the cat", "max_output_tokens": 4, "include": ["message.output_text.logprobs"]},
    ),
}
# Field → pairs of an unusual JSON form and the engine's form.
ODD: dict[str, list[tuple[Any, Any]]] = {
    "n": [(1, None)],
    "best_of": [(1, None)],
    "temperature": [(1, 1.0), (0, 0.0)],
    "top_p": [(1, 1.0)],
    "top_k": [(-1, 0)],
    "min_p": [(1, 1.0), (0, 0.0)],
    "seed": [(-5, -5)],
    "stop": [("zz", ["zz"]), ([], None)],
    "stop_token_ids": [([], None), ([9], [9, 9])],
    "ignore_eos": [(True, True)],
    "include_stop_str_in_output": [(False, None)],
    "logit_bias": [
        ({"100": 50}, {"100": 50.0}),
        ({}, None),
        ({"9": -1, "100": 2.5}, {"100": 2.5, "9": -1.0}),
    ],
    "allowed_token_ids": [([9, 9, 17], [17, 9])],
    "bad_words": [([], None), (["the", "the"], ["the"])],
    "min_tokens": [(0, None)],
    "presence_penalty": [(1, 1.0)],
    "frequency_penalty": [(-1, -1.0)],
    "repetition_penalty": [(2, 2.0)],
    "logits_processors_args": [({}, None), ({"logit_bias": {"9": 5}}, {"logit_bias": {"9": 5.0}})],
    "response_format": [({"type": "text"}, None)],
    "logprob_token_ids": [([], None), ([9], [9])],
    "logprobs_mode": [("raw_logprobs", None)],
    "prompt_logprobs": [(0, 0)],
    **{name: [(False, None)] for name in KERNEL_EXTRAS},
    "explain": [(False, None)],
    "digest": [(False, None)],
    "return_routed_experts": [(False, None)],
    "field_logprobs": [(False, None)],
    "lora": [(None, None)],
}


@pytest.fixture(scope="module", params=LAYOUTS)
def laid_out(request: pytest.FixtureRequest, serve_process: Any) -> Iterator[Attacked]:
    """A server of each layout."""
    flags = ("--logits-processors", "LogitBiasLogitsProcessor", *LAYOUTS[request.param])
    with serve_process(*flags) as server:
        yield server


def said(reply: Any) -> Any:
    """Return the text of a reply (numbers may differ in the last bits between batches)."""
    assert reply.status == 200, reply.data[:500]
    found = json.loads(reply.data)
    if "output" in found:
        return found["output"][0]["content"][0]["text"]
    return [one.get("text", one.get("message")) for one in found["choices"]]


def test_every_field_of_every_route_is_served_in_every_legal_form(laid_out: Attacked) -> None:
    assert set(SAMPLING_FIELDS) <= ODD.keys()
    engines = psutil.Process(laid_out.process.pid).children()

    def both(asked: tuple[str, str, Any, Any]) -> None:
        path, name, odd, plain = asked
        body: dict[str, Any] = {"temperature": 1.3, "seed": 3} | BODIES[path][1]
        got, want = (laid_out.post(path, **body | {name: form}) for form in (odd, plain))
        assert said(got) == said(want), (path, name, odd)

    asks = [
        (path, name, odd, plain)
        for path, (kind, _) in BODIES.items()
        for name, forms in ODD.items()
        if name in kind.__struct_fields__
        for odd, plain in forms
    ]
    with ThreadPoolExecutor(8) as threads:
        for _ in threads.map(both, asks):
            pass
    assert psutil.Process(laid_out.process.pid).children() == engines, "an engine was started again"


def test_openais_form_of_logit_bias_ends_nobody(laid_out: Attacked) -> None:
    """It once ended the engine process with everything that ran there."""
    with ThreadPoolExecutor() as threads:
        neighbour = threads.submit(
            laid_out.post, "/v1/completions", prompt="the cat", max_tokens=100, ignore_eos=True
        )
        reply = laid_out.post(
            "/v1/completions", prompt=[5], max_tokens=2, logit_bias={"100": 50}, return_token_ids=True
        )
        assert reply.status == 200, reply.data
        assert json.loads(reply.data)["choices"][0]["token_ids"] == [100, 100]
        assert neighbour.result().status == 200
    laid_out.check_alive()
