"""Replies as Arrow streams and Parquet files have the numbers, text and facts of the same reply in JSON."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from logprobe import SamplingParams
from logprobe.analysis import verify
from logprobe.errors import InputError
from logprobe.server.http import replies
from server_process import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

pa = pytest.importorskip("pyarrow")

from logprobe.records import read_parquet  # noqa: E402 - needs pyarrow
from logprobe.records.replies import read_reply  # noqa: E402

ARROW, PARQUET = replies.ARROW_TYPE, replies.PARQUET_TYPE
MESSAGES = [{"role": "user", "content": "the cat"}]
SAMPLED = {"max_tokens": 9, "seed": 5, "ignore_eos": True, "temperature": 0.8}
COMPLETION = {"prompt": "the cat", "logprobs": 3, "return_token_ids": True, **SAMPLED}
CHAT = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, "return_token_ids": True, **SAMPLED}
RESPONSE = {
    "input": "the cat",
    "top_logprobs": 3,
    "include": ["message.output_text.logprobs"],
    "max_output_tokens": 9,
    "seed": 5,
    "temperature": 0.8,
}


def binary(server: Any, path: str, accept: str = ARROW, **body: Any) -> httpx.Response:
    reply = httpx.post(server.url + path, json=body, headers={"accept": accept}, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == accept.partition(",")[0]
    return reply


def table_of(data: bytes) -> Any:
    return pa.ipc.open_stream(data).read_all()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_completions_have_the_numbers_of_json(server: Any, is_stream: bool, n: int) -> None:
    body = COMPLETION | {"n": n}
    plain = server.post("/v1/completions", **body).json()
    rows = table_of(binary(server, "/v1/completions", **body, stream=is_stream).content).to_pylist()
    for choice in plain["choices"]:
        own = [row for row in rows if row["request_id"] == str(choice["index"])]
        logprobs = choice["logprobs"]
        assert [row["position"] for row in own] == [*range(9)]
        assert [row["token_id"] for row in own] == choice["token_ids"]
        assert "".join(row["text"] for row in own) == choice["text"]
        assert [row["logprob"] for row in own] == pytest.approx(logprobs["token_logprobs"], abs=1e-6)
        assert [row["rank"] for row in own] == logprobs["ranks"]
        for row, named in zip(own, logprobs["top_logprobs"], strict=True):
            assert row["top_logprobs"] == pytest.approx(sorted(named.values())[::-1][:3], abs=1e-6)
            assert row["top_logprobs"] == sorted(row["top_logprobs"], reverse=True)


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_rest_of_a_reply_is_its_metadata(server: Any, is_stream: bool) -> None:
    plain = server.post("/v1/completions", **COMPLETION).json()
    found = read_reply(binary(server, "/v1/completions", **COMPLETION, stream=is_stream).content)
    assert found.texts == {"0": plain["choices"][0]["text"]}
    want, got = plain["choices"][0], found.reply["choices"][0]
    assert got == want | {"logprobs": None}
    assert found.reply["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    info = found.records["0"].info
    assert info is not None
    assert (info.stages, info.num_logprobs, info.generator) == (("raw",), 3, "philox4x64-10")


@pytest.mark.parametrize("is_stream", [False, True])
def test_chats_have_the_rows_of_the_engine(server: Any, is_stream: bool) -> None:
    plain = server.post("/v1/chat/completions", **CHAT).json()["choices"][0]
    found = read_reply(binary(server, "/v1/chat/completions", **CHAT, stream=is_stream).content)
    assert found.reply["choices"][0]["message"] == plain["message"]
    assert found.token_ids["0"].tolist() == plain["token_ids"]
    want = [one["logprob"] for one in plain["logprobs"]["content"]]
    assert found.records["0"].chosen_entries().logprobs.tolist() == pytest.approx(want, abs=1e-6)
    tops = found.records["0"].top_entries().logprobs.reshape(-1, 3)
    for own, one in zip(tops, plain["logprobs"]["content"], strict=True):
        assert own.tolist() == pytest.approx([top["logprob"] for top in one["top_logprobs"]][:3], abs=1e-6)


@pytest.mark.parametrize("is_stream", [False, True])
def test_responses_have_rows_too_and_are_stored(server: Any, is_stream: bool) -> None:
    found = read_reply(binary(server, "/v1/responses", **RESPONSE, stream=is_stream).content)
    plain = server.post("/v1/responses", **RESPONSE).json()
    part, own = plain["output"][0]["content"][0], found.reply["output"][0]["content"][0]
    assert own == part | {"logprobs": []}
    want = [one["logprob"] for one in part["logprobs"]]
    assert found.records["0"].chosen_entries().logprobs.tolist()[: len(want)] == pytest.approx(want, abs=1e-6)
    kept = server.get(f"/v1/responses/{found.reply['id']}").json()
    assert kept["output"][0]["content"][0]["text"] == part["text"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_prompts_processed_rows_and_columns_are_those_of_the_library(server: Any, is_stream: bool) -> None:
    asked = {"prompt_logprobs": 2, "logprobs_mode": "both", "entropy": True, "logprob_token_ids": [7, 9]}
    body = {"prompt": [5, 6, 7], "logprobs": 2, "top_k": 5, **SAMPLED, **asked}
    params = SamplingParams(logprobs=2, top_k=5, **SAMPLED, **asked)  # type: ignore[arg-type]
    (near,) = server.llm.generate([[5, 6, 7]], params)
    found = read_reply(binary(server, "/v1/completions", **body, stream=is_stream).content)
    assert found.token_ids["0/prompt"].tolist() == [5, 6, 7]
    (own,) = near.outputs
    wants = {"0": own.logprobs, "0/processed": own.processed_logprobs, "0/prompt": near.prompt_logprobs}
    assert found.records.keys() == wants.keys()
    for name, want in wants.items():
        got = found.records[name].with_table(want.table)
        assert got == want
        assert got.info == want.info, name
        assert got.given == want.given
        for column, values in want.extras.items():
            np.testing.assert_array_equal(got.extras[column], values)


def test_counts_of_two_sizes_and_no_counts_at_all(server: Any) -> None:
    mixed = {"prompt": [5, 6], "logprobs": 2, "prompt_logprobs": 1, **SAMPLED}
    found = read_reply(binary(server, "/v1/completions", **mixed).content)
    assert found.records["0"].num_entries >= 18
    assert found.records["0/prompt"][0] is None
    alone = read_reply(
        binary(server, "/v1/completions", **mixed | {"logprobs": 0, "prompt_logprobs": None}).content
    )
    assert alone.records["0"].num_entries == 9
    bare = binary(server, "/v1/completions", prompt="a", **SAMPLED).content
    assert table_of(bare).schema.names == ["request_id", "position", "token_id", "text"]
    assert read_reply(bare).records == {}
    assert len(read_reply(bare).token_ids["0"]) == 9


@pytest.mark.parametrize("echo", [False, True])
def test_a_prompt_that_is_only_scored_has_rows(server: Any, echo: bool) -> None:
    body = {"prompt": "the cat", "max_tokens": 0, "logprobs": 1, "echo": echo, "prompt_logprobs": 1}
    for is_stream in (False, True):
        found = read_reply(binary(server, "/v1/completions", **body, stream=is_stream).content)
        assert found.records["0/prompt"][0] is None
        assert found.reply["choices"][0]["text"] == ("the cat" if echo else "")


def test_parquet_is_read_by_the_readers_of_records(server: Any, tmp_path: Path) -> None:
    path = tmp_path / "reply.parquet"
    path.write_bytes(binary(server, "/v1/completions", PARQUET, **COMPLETION, n=2).content)
    streamed = read_reply(binary(server, "/v1/completions", **COMPLETION, n=2).content)
    assert read_parquet(path) == read_reply(path).records == streamed.records
    assert read_reply(path).texts == streamed.texts
    polars = pytest.importorskip("polars")
    assert polars.read_parquet(io.BytesIO(path.read_bytes()))["token_id"].to_list() == [
        token for ids in streamed.token_ids.values() for token in ids.tolist()
    ]


def test_top_k_lists_have_a_fixed_size(server: Any) -> None:
    schema = table_of(binary(server, "/v1/chat/completions", **CHAT, stream=True).content).schema
    assert schema.field("top_ids").type == pa.list_(pa.int32(), 3)
    assert schema.field("top_logprobs").type == pa.list_(pa.float32(), 3)
    assert b"logprobe.info" in schema.metadata


@pytest.mark.parametrize(
    ("accept", "is_arrow"),
    [
        (f"{ARROW}, application/json;q=0.5", True),
        (f"application/json, {ARROW};q=0.5", False),
        (f"{ARROW};q=0, */*", False),
        (f"{ARROW};q=x", False),
        (f"*/*;q=0.1, {ARROW}", True),
        (ARROW.replace("application", "Application"), True),
        (f"text/event-stream, {ARROW};q=0.5", False),
    ],
)
def test_the_media_type_is_negotiated(server: Any, accept: str, is_arrow: bool) -> None:
    headers = {"accept": accept}
    reply = httpx.post(f"{server.url}/v1/completions", json=COMPLETION, headers=headers, timeout=PATIENCE_S)
    assert reply.headers["content-type"] == (ARROW if is_arrow else "application/json")


@pytest.mark.parametrize(
    ("accept", "body", "parameter"),
    [
        (PARQUET, COMPLETION | {"stream": True}, "stream"),
        (ARROW, COMPLETION | {"field_logprobs": True}, "field_logprobs"),
        (ARROW, CHAT | {"include_reasoning": False}, "include_reasoning"),
    ],
)
def test_what_binary_replies_do_not_have_is_refused(
    server: Any, accept: str, body: Any, parameter: str
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = httpx.post(server.url + path, json=body, headers={"accept": accept}, timeout=PATIENCE_S)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == parameter


def test_without_pyarrow_the_extra_is_named(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "find_spec", lambda _: None)
    for accept, status in {ARROW: 406, f"{ARROW}, application/json": 200}.items():
        reply = httpx.post(
            f"{server.url}/v1/completions", json=COMPLETION, headers={"accept": accept}, timeout=PATIENCE_S
        )
        assert reply.status_code == status
        assert reply.headers["content-type"] == "application/json"
        assert (status == 200) != ("extra `arrow`" in reply.text)


def test_binary_replies_count_as_logprob_bytes(server: Any) -> None:
    registry = server.service.metrics.registry
    for accept, is_stream in ((ARROW, False), (ARROW, True), (PARQUET, False)):
        before = registry.get_sample_value("logprobe_logprob_bytes_total")
        reply = binary(server, "/v1/completions", accept, **COMPLETION, stream=is_stream)
        assert registry.get_sample_value("logprobe_logprob_bytes_total") - before == len(reply.content)


def test_an_error_in_a_stream_ends_it_with_metadata(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> None:
        raise InputError("no rows today")

    generation = "logprobe.server.reply.Generation"
    monkeypatch.setattr(f"{generation}._find_members", fail)
    data = binary(server, "/v1/completions", **COMPLETION, stream=True).content
    assert table_of(data).num_rows == 0
    with pytest.raises(InputError, match="ended the stream"):
        read_reply(data)


def test_an_error_in_the_first_step_of_a_stream_is_readable(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise InputError("no rows today")

    monkeypatch.setattr("logprobe.records.replies.ReplySchema.batches", fail)
    data = binary(server, "/v1/completions", **COMPLETION, stream=True).content
    with pytest.raises(InputError, match="no rows today"):
        read_reply(data)


def test_streams_of_several_prompts_have_the_records_of_whole_replies(server: Any) -> None:
    body: Any = COMPLETION | {"prompt": ["the cat", "a dog"], "n": 2, "prompt_logprobs": 1}
    whole, stream = (
        read_reply(binary(server, "/v1/completions", **body, stream=is_stream).content)
        for is_stream in (False, True)
    )
    assert stream.records.keys() == {"0", "1", "2", "3", "0/prompt", "2/prompt"}
    assert stream.records == whole.records
    assert stream.texts == whole.texts


def test_a_compressed_or_damaged_stream_is_refused(server: Any) -> None:
    data = binary(server, "/v1/completions", **COMPLETION).content
    table, sink = table_of(data), pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    with pytest.raises(InputError, match="compressed"):
        read_reply(sink.getvalue().to_pybytes())
    for stop in range(0, len(data) - 9, 97):
        with pytest.raises(InputError):
            read_reply(data[:stop])


@pytest.mark.parametrize("logprobs", [3, None])
def test_damaged_bytes_never_do_anything_but_raise(server: Any, logprobs: int | None) -> None:
    asked = COMPLETION | {"logprobs": logprobs}
    data = binary(server, "/v1/completions", **asked).content
    random = np.random.default_rng(3)
    for _ in range(200):
        damaged = bytearray(data)
        damaged[int(random.integers(len(data)))] ^= int(random.integers(1, 256))
        try:
            read_reply(bytes(damaged))
        except InputError:
            continue


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION | {"n": 2, "prompt": ["the cat", "a dog"]}),
        ("/v1/chat/completions", CHAT),
    ],
)
def test_replies_with_digests_are_verified(server: Any, path: str, body: Any) -> None:
    asked = body | {"digest": True, "return_token_ids": None}
    plain = server.post(path, **asked).json()
    from_rows = read_reply(binary(server, path, **asked).content).reply
    for reply in (plain, from_rows):
        found = verify(server.llm, reply)
        assert len(found) == (4 if "prompt" in body else 1)
        assert all(one.num_identical == one.num_tokens == 9 for one in found)


def test_digests_are_streamed_and_need_logprobs(server: Any) -> None:
    body = COMPLETION | {"digest": True}
    whole = server.post("/v1/completions", **body).json()["choices"][0]["digests"]
    lines = server.post("/v1/completions", **body, stream=True).text.split("data: ")
    chunks = [json.loads(line) for line in lines if line.startswith("{")]
    assert [one for chunk in chunks for one in chunk["choices"][0]["digests"]] == whole
    reply = server.post("/v1/completions", prompt="a", digest=True)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "digest")
