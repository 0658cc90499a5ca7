"""The mode of log-probabilities comes from the request or the server's default; modes can be mixed."""

from __future__ import annotations

from typing import Any

import pytest

from logprobe.sampling.params import MODES
from logprobe.server import ServerSettings

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES: Any = [{"role": "user", "content": "the cat and the dog"}]
LOGPROBS: Any = ["message.output_text.logprobs"]
SHAPED: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "seed": 1}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 5, **SHAPED},
    COMPLETIONS: {"prompt": "the cat", "max_tokens": 6, "logprobs": 5, "prompt_logprobs": 2, **SHAPED},
    RESPONSES: {
        "input": "the cat and the dog",
        "max_output_tokens": 6,
        "include": LOGPROBS,
        "top_logprobs": 5,
        **SHAPED,
    },
}


def ask(server: Any, path: str, **fields: Any) -> dict[str, Any]:
    reply = server.post(path, **BODIES[path] | fields)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def rows_of(reply: dict[str, Any]) -> Any:
    """Return everything in a reply about its tokens' log-probabilities."""
    found = [reply.get("logprobs_info")]
    if "output" in reply:
        return found + [part for item in reply["output"] for part in item["content"]]
    names = ("logprobs", "prompt_logprobs", "logprobs_info")
    return found + [choice.get(name) for choice in reply["choices"] for name in names]


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_names_no_distribution_has_the_servers(
    server: Any, new_server: Any, mode: str
) -> None:
    with new_server(logprobs_mode=mode) as own:
        assert own.get("/v1/capabilities").json()["logprobs_mode"] == mode
        for path in BODIES:
            expected = rows_of(ask(server, path, logprobs_mode=mode))
            found = rows_of(ask(own, path))
            if mode == "raw_logprobs":  # reported only if the request names it
                assert "logprobs_info" not in str(found)
                found = rows_of(ask(own, path, logprobs_mode=mode))
            assert found == expected
            other = "processed_logprobs" if mode == "raw_logprobs" else "raw_logprobs"
            assert rows_of(ask(own, path, logprobs_mode=other)) == rows_of(
                ask(server, path, logprobs_mode=other)
            )


def test_a_request_without_logprobs_is_not_told_of_any(new_server: Any) -> None:
    without = (
        {"logprobs": None, "top_logprobs": None},
        {"logprobs": None},
        {"include": None, "top_logprobs": None},
    )
    with new_server(logprobs_mode="both") as server:
        for path, fields in zip(BODIES, without, strict=True):
            reply = ask(server, path, **fields, **({"prompt_logprobs": None} if path == COMPLETIONS else {}))
            assert "processed" not in str(reply)
            assert "logprobs_info" not in str(reply)
        scored = ask(server, COMPLETIONS, max_tokens=0, echo=True, logprobs=2, prompt_logprobs=None)
        plain = server.post(CHAT, messages=MESSAGES, max_tokens=1).json()
    assert all(scored["choices"][0]["logprobs"]["top_logprobs"][1:]), "a prompt has the model's own numbers"
    assert plain["choices"][0]["logprobs"] is None


def test_a_response_has_both_side_by_side_whole_and_streamed(client: Any) -> None:
    asked: dict[str, Any] = {"model": "default", "input": "the cat", "max_output_tokens": 12}
    asked |= {"include": LOGPROBS, "top_logprobs": 5, "temperature": 0.5}
    extra = {"seed": 1, "top_k": 3}
    both = client.responses.create(**asked, extra_body=extra | {"logprobs_mode": "both"})
    modes = {"logprobs": "raw_logprobs", "processed_logprobs": "processed_logprobs"}
    (part,) = both.output[0].content
    for name, mode in modes.items():
        alone = client.responses.create(**asked, extra_body=extra | {"logprobs_mode": mode})
        rows = alone.output[0].content[0].model_dump()["logprobs"]
        assert part.model_dump()[name] == rows
        assert "processed_logprobs" not in alone.output[0].content[0].model_dump()
        assert {len(row["top_logprobs"]) for row in rows} == {5 if mode == "raw_logprobs" else 3}
    assert both.logprobs_info["stages"] == ["raw", "processed"]
    events = [*client.responses.create(**asked, stream=True, extra_body=extra | {"logprobs_mode": "both"})]
    deltas = [one.model_dump() for one in events if one.type == "response.output_text.delta"]
    (done,) = [one.model_dump() for one in events if one.type == "response.output_text.done"]
    for name in modes:
        assert [row for delta in deltas for row in delta[name]] == part.model_dump()[name] == done[name]
    assert events[-1].response.output[0].content[0].model_dump() == part.model_dump()
    assert client.responses.retrieve(both.id).output[0].content[0].model_dump() == part.model_dump()


def test_a_response_with_both_comes_back_as_input(client: Any) -> None:
    asked: dict[str, Any] = {"model": "default", "max_output_tokens": 2, "include": LOGPROBS}
    mode = {"logprobs_mode": "both"}
    first = client.responses.create(input="the cat", **asked, extra_body=mode)
    said: Any = [*MESSAGES, *(item.model_dump() for item in first.output), *MESSAGES]
    again = client.responses.create(input=said, **asked, extra_body=mode)
    assert again.usage.input_tokens > first.usage.input_tokens


def test_raw_rows_of_what_a_grammar_forces_are_the_models_own(server: Any) -> None:
    form = {"type": "choice", "choice": ["dogs and cats"]}
    reply = ask(server, CHAT, response_format=form, max_tokens=20, logprobs_mode="both")
    rows = reply["choices"][0]["logprobs"]
    raw, processed = ([row["logprob"] for row in rows[name]] for name in ("content", "processed_content"))
    free = ask(server, CHAT, max_tokens=20)["choices"][0]["logprobs"]["content"]
    assert processed == [0.0] * len(raw), "the only text that the grammar allows"
    assert sum(raw) / len(raw) < sum(row["logprob"] for row in free) / len(free) - 1
    assert rows["log_kept_mass"][0] < 0
    for row in rows["processed_content"]:
        assert min(one["logprob"] for one in row["top_logprobs"]) > -9999


def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="logprobs_mode: must be one of raw_logprobs"):
        ServerSettings(logprobs_mode="raw_logits")
