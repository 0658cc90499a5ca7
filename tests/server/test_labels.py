"""`/v1/label`, `/v1/judge` and `/v1/rerank`: the library's numbers in formats that clients know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import LLM
from logprobe.analysis import Classification, FittedConfidence, calibrate
from logprobe.errors import ParameterError
from logprobe.server import ServerSettings
from logprobe.server.routes.labels import ranked
from logprobe.server.settings import read_confidences
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPTS = ["the cat and", "a dog"]
LABELS = {"animal": [" the dog", " a cat"], "other": " of"}
TALK = [{"role": "user", "content": "the cat"}]
EMPTY = [{"role": "user", "content": "th"}]
LAYOUT: dict[str, Any] = {"template": ["th ", "{task}{query}: {document}", " the"], "labels": [" a", " o"]}
DOCUMENTS = ["the cat", "a dog and a cat", "", "in the"]


@pytest.fixture(scope="module")
def exact(tiny_model_folder: Path, serve_llm: Any) -> Iterator[Any]:
    """A server and a model whose results do not depend on the batch."""
    with (
        LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm,
        serve_llm(llm) as running,
    ):
        yield running


def reply_to(server: Any, path: str, **body: Any) -> dict[str, Any]:
    reply = server.post(path, **body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.parametrize(
    "how", [{}, {"correction": "length"}, {"correction": "calibrated", "content_free": "th"}], ids=str
)
def test_labels_have_the_bits_of_the_library(exact: Any, how: dict[str, Any]) -> None:
    reply = reply_to(exact, "/v1/label", input=PROMPTS, labels=LABELS, **how)
    want = exact.llm.classify(PROMPTS, LABELS, **how)
    assert (reply["object"], reply["unit"], reply["model"]) == ("list", "nats", exact.service.model_name)
    for index, (found, one) in enumerate(zip(reply["data"], want, strict=True)):
        assert found == {
            "index": index,
            "label": one.label,
            "labels": ["animal", "other"],
            "num_classes": 2,
            "probs": list(one.probabilities.values()),
            "logprobs": one.logprobs.tolist(),
            "corrected": one.corrected.tolist(),
            "mass": one.mass,
            "margin": one.margin,
            "boundary": "token",
        }


def test_labels_that_no_token_begins_with_are_measured_by_bytes(exact: Any) -> None:
    asked: dict[str, Any] = {"input": "the ca", "labels": ["t and", "n of", "r"]}
    (found,) = reply_to(exact, "/v1/label", **asked)["data"]
    [want] = exact.llm.classify("the ca", asked["labels"])
    assert found["boundary"] == want.boundary == "bytes"
    assert found["logprobs"] == want.logprobs.tolist()
    assert found["mass"] == want.mass < 1


def test_one_text_is_a_list_of_one_and_one_label_has_no_margin(exact: Any) -> None:
    (found,) = reply_to(exact, "/v1/label", input=PROMPTS[0], labels=[" of"])["data"]
    assert found["logprobs"] == exact.llm.classify(PROMPTS[0], [" of"])[0].logprobs.tolist()
    assert (found["probs"], found["margin"]) == ([1.0], None)


def test_a_conversation_is_answered_as_by_the_library(exact: Any) -> None:
    how: dict[str, Any] = {"correction": "calibrated", "content_free": EMPTY}
    (found,) = reply_to(exact, "/v1/label", messages=TALK, labels=["the dog", "of"], **how)["data"]
    [want] = exact.llm.classify(TALK, ["the dog", "of"], **how)
    assert (found["logprobs"], found["corrected"]) == (want.logprobs.tolist(), want.corrected.tolist())


@pytest.mark.parametrize("scale", [None, [*range(1, 11)], [0, 0.5, 1]], ids=str)
def test_grades_have_the_bits_of_the_library(exact: Any, scale: list[float] | None) -> None:
    options = {} if scale is None else {"scale": scale}
    (found,) = reply_to(exact, "/v1/judge", messages=TALK, **options)["data"]
    [want] = exact.llm.judge(TALK, **options)
    assert found == {
        "index": 0,
        "expectation": want.expectation,
        "spread": want.spread,
        "off_scale": want.off_scale,
        "scale": list(want.scale),
        "probs": list(want.grades.probabilities.values()),
        "logprobs": want.grades.logprobs.tolist(),
        "boundary": "token",
    }
    texts = reply_to(exact, "/v1/judge", input=PROMPTS, **options)["data"]
    wanted = exact.llm.judge(PROMPTS, **options)
    assert [one["expectation"] for one in texts] == [one.expectation for one in wanted]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_best_first_with_the_bits_of_the_library(exact: Any, path: str) -> None:
    as_objects = [{"text": one} if place % 2 else one for place, one in enumerate(DOCUMENTS)]
    reply = reply_to(exact, path, model="default", query="the", documents=as_objects, task="on", **LAYOUT)
    want = exact.llm.rerank("the", DOCUMENTS, task="on", **LAYOUT)
    order = sorted(range(len(want)), key=lambda place: -want[place])
    assert order != sorted(order)
    assert reply.keys() == {"id", "model", "usage", "results"}
    assert reply["results"] == [
        {"index": place, "relevance_score": want[place], "document": {"text": DOCUMENTS[place]}}
        for place in order
    ]
    text = exact.llm.text
    parts = [("th ", f"onthe: {document}", " the") for document in DOCUMENTS]
    lengths = [sum(len(text.encode(part, add_special_tokens=False)) for part in one) + 1 for one in parts]
    assert reply["usage"]["total_tokens"] == 2 * sum(lengths)


def test_as_many_documents_come_as_are_asked_for(exact: Any) -> None:
    asked = {"query": "the", "documents": DOCUMENTS, **LAYOUT}
    whole = reply_to(exact, "/v1/rerank", **asked)["results"]
    for top_n, count in ((1, 1), (3, 3), (9, 4), (0, 4)):
        assert reply_to(exact, "/v1/rerank", top_n=top_n, **asked)["results"] == whole[:count]
    bare = reply_to(exact, "/v1/rerank", return_documents=False, **asked)["results"]
    assert bare == [{name: one[name] for name in ("index", "relevance_score")} for one in whole]


def test_equal_documents_keep_their_order_and_what_is_no_number_comes_last() -> None:
    found = ranked([0.5, float("nan"), 0.5, 0.75], None)
    assert [one["index"] for one in found] == [3, 0, 2, 1]
    assert found[-1]["relevance_score"] is None


GOOD: dict[str, dict[str, Any]] = {
    "/v1/label": {"input": "the", "labels": [" cat", " dog"]},
    "/v1/judge": {"input": "the"},
    "/v1/rerank": {"query": "the", "documents": ["cat"], **LAYOUT},
}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/label", {"input": None}, "input"),
        ("/v1/label", {"messages": TALK}, "input"),
        ("/v1/label", {"input": []}, "input"),
        ("/v1/label", {"input": ["a", 5]}, "input[1]"),
        ("/v1/label", {"input": "the " * 400}, "input"),
        ("/v1/label", {"input": ["a", "x" * 200]}, "input"),
        (
            "/v1/label",
            {"input": None, "messages": [{"role": "user", "content": "x" * 200}]},
            "messages",
        ),
        ("/v1/label", {"input": None, "messages": [{"content": "a"}]}, "messages[0].role"),
        ("/v1/label", {"labels": []}, "labels"),
        ("/v1/label", {"labels": "yes"}, "labels"),
        ("/v1/label", {"labels": ["yes", ""]}, "labels"),
        ("/v1/label", {"labels": ["yes", "yes"]}, "labels"),
        ("/v1/label", {"labels": ["1", "10"]}, "labels"),
        ("/v1/label", {"labels": {"a": ["x", "y"], "b": "x"}}, "labels"),
        ("/v1/label", {"labels": {"a": []}}, "labels"),
        ("/v1/label", {"labels": ["x" * 50_000]}, "labels"),
        ("/v1/label", {"correction": "other"}, "correction"),
        ("/v1/label", {"content_free": "N/A"}, "content_free"),
        ("/v1/label", {"correction": "calibrated", "content_free": []}, "content_free"),
        (
            "/v1/label",
            {"correction": "calibrated", "content_free": [{"content": "a"}]},
            "content_free[0].role",
        ),
        (
            "/v1/label",
            {"correction": "calibrated", "content_free": [{"role": "user", "content": "the " * 9000}]},
            "content_free",
        ),
        ("/v1/judge", {"input": None}, "input"),
        ("/v1/judge", {"scale": [1]}, "scale"),
        ("/v1/judge", {"scale": [2, 2]}, "scale"),
        ("/v1/judge", {"scale": ["1", "2"]}, "scale[0]"),
        ("/v1/judge", {"input": "x" * 200}, "input"),
        ("/v1/rerank", {"documents": []}, "documents"),
        ("/v1/rerank", {"documents": "cat"}, "documents"),
        ("/v1/rerank", {"documents": [{"title": "a"}]}, "documents[0].text"),
        ("/v1/rerank", {"documents": ["x" * 200]}, "documents"),
        ("/v1/rerank", {"query": None}, "query"),
        ("/v1/rerank", {"top_n": -1}, "top_n"),
        ("/v1/rerank", {"labels": ["yes"]}, "labels"),
        ("/v1/rerank", {"labels": ["yes", "yes, sir"]}, "labels"),
        ("/v1/rerank", {"template": ["", "{query}", ""]}, "template"),
        ("/v1/rerank", {"template": ["", "{query}{document}"]}, "template"),
        ("/v1/rerank", {"max_tokens_per_doc": 5}, "max_tokens_per_doc"),
        *((path, {"lora": "none"}, "lora") for path in GOOD),
    ],
)
def test_what_cannot_be_asked_is_a_400_that_names_its_field(
    exact: Any, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = exact.post(path, **GOOD[path] | fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_half_a_surrogate_pair_is_refused_by_its_field(exact: Any) -> None:
    for path, field, data in (
        ("/v1/label", "input", rb'{"input": "\ud800", "labels": ["a"]}'),
        ("/v1/label", "labels", rb'{"input": "a", "labels": ["\ud800"]}'),
        ("/v1/rerank", "query", rb'{"query": "\ud800", "documents": ["a"]}'),
        ("/v1/rerank", "documents", rb'{"query": "a", "documents": ["\ud800"]}'),
    ):
        reply = exact.post_bytes(path, data)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] in {field, None}, path


FITTED = (" good", " bad")


@pytest.fixture(scope="module")
def fitted_server(new_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("fits") / "fit.json"
    fit = calibrate(
        [Classification(FITTED, np.log([p, 1 - p]), np.log([p, 1 - p])) for p in np.linspace(0.1, 0.9, 60)],
        [FITTED[number % 3 == 0] for number in range(60)],
        coverage=0.8,
    )
    fit.save(path)
    with new_server(confidence=(f"moods={path}",)) as running:
        yield running


def test_a_fit_is_applied_by_its_name(fitted_server: Any) -> None:
    asked = {"input": ["the cat is", "the dog"], "labels": [*FITTED]}
    reply = fitted_server.post("/v1/label", **asked, confidence="moods").json()["data"]
    bare = fitted_server.post("/v1/label", **asked).json()["data"]
    (setting,) = fitted_server.service.settings.confidence
    fit = FittedConfidence.load(setting.partition("=")[2])
    near = fitted_server.llm.classify(asked["input"], asked["labels"], confidence=fit)
    for one, plain, own in zip(reply, bare, near, strict=True):
        found = one.pop("confidence")
        assert one == plain
        scaled = np.exp(np.array(one["logprobs"]) / fit.temperature)
        assert found["probs"] == pytest.approx((scaled / scaled.sum()).tolist(), abs=1e-6)
        assert found["probs"] == pytest.approx(own.confidence.shares.tolist(), abs=1e-6)
        assert found["label"] == FITTED[int(np.argmax(found["probs"]))]
        assert found["probability"] == max(found["probs"])
        wanted = [name for name, share in zip(FITTED, found["probs"], strict=True) if share >= fit.threshold]
        assert found["label_set"] == wanted


@pytest.mark.parametrize("change", [{"confidence": "others"}, {"labels": [" good", " poor"]}])
def test_a_fit_that_does_not_fit_is_refused(fitted_server: Any, change: Any) -> None:
    asked = {"input": "the cat is", "labels": [*FITTED], "confidence": "moods"} | change
    reply = fitted_server.post("/v1/label", **asked)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "confidence"


@pytest.mark.parametrize("content", [None, "{}", '{"version": 9}'])
def test_a_file_that_is_no_fit_ends_the_start(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ParameterError) as caught:
        read_confidences(ServerSettings(confidence=(f"moods={path}",)))
    assert caught.value.parameter == "confidence"
    assert str(caught.value).count(str(path)) == 1
    with raises(ParameterError, parameter="confidence"):
        ServerSettings(confidence=("moods",))
