"""Labels, documents and grades: probabilities of whole answers, compared with transformers' rows."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from logprobe import LLM
from logprobe.analysis.labels import (
    RERANK_AFTER,
    RERANK_BEFORE,
    RERANK_PAIR,
    RERANK_TASK,
    Classification,
    judge_plan,
    texts_of,
)
from logprobe.errors import ParameterError
from pairs import encode_pair
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

PROMPT = "the cat and"
LABELS = [" the dog", " of the", " a"]
TALK = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def rows(tiny_model_folder: Path) -> Any:
    """Return a function from ids to (T, V) log-probabilities of transformers, float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder).double().eval()

    @torch.inference_mode()
    def of(ids: list[int]) -> Any:
        return model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()

    return of


def whole(rows: Any, before: list[int], after: list[int]) -> float:
    found = rows([*before, *after])
    return float(sum(found[len(before) - 1 + place, token_id] for place, token_id in enumerate(after)))


def truth(tiny_llm: LLM, rows: Any, prompt: str, label: str) -> tuple[float, int]:
    ids, start = encode_pair(tiny_llm.text, prompt, label)
    listed = ids.tolist()
    return whole(rows, listed[:start], listed[start:]), len(listed) - start


def test_a_label_has_the_probability_of_all_its_tokens(tiny_llm: LLM, rows: Any) -> None:
    [found] = tiny_llm.classify(PROMPT, LABELS)
    want = np.array([truth(tiny_llm, rows, PROMPT, label)[0] for label in LABELS])
    np.testing.assert_allclose(found.logprobs, want, atol=1e-4)
    np.testing.assert_allclose(found.mass, np.exp(want).sum(), rtol=1e-4)
    shares = np.exp(want) / np.exp(want).sum()
    np.testing.assert_allclose(list(found.probabilities.values()), shares, atol=1e-5)
    assert found.label == LABELS[int(want.argmax())]
    np.testing.assert_allclose(found.margin, np.diff(np.sort(want))[-1], atol=2e-4)
    assert "mass" in repr(found)


def test_many_prompts_give_what_each_gives_alone(tiny_llm: LLM) -> None:
    prompts = [PROMPT, "a dog", "the"]
    found: Any = tiny_llm.classify(prompts, LABELS)
    for prompt, one in zip(prompts, found, strict=True):
        [alone] = tiny_llm.classify(prompt, LABELS)
        np.testing.assert_allclose(one.logprobs, alone.logprobs, atol=5e-5)


def test_texts_that_mean_one_label_are_added_up(tiny_llm: LLM) -> None:
    [named] = tiny_llm.classify(PROMPT, {"animal": [" the dog", " a cat"], "other": " of"})
    [alone] = tiny_llm.classify(PROMPT, [" the dog", " a cat", " of"])
    np.testing.assert_allclose(named.logprobs[0], np.logaddexp(*alone.logprobs[:2]), atol=1e-5)
    assert named.labels == ("animal", "other")


def test_corrections_are_what_their_papers_say(tiny_llm: LLM, rows: Any) -> None:
    want = [truth(tiny_llm, rows, PROMPT, label) for label in LABELS]
    [by_length] = tiny_llm.classify(PROMPT, LABELS, correction="length")
    np.testing.assert_allclose(by_length.corrected, [total / count for total, count in want], atol=1e-4)
    empty = [truth(tiny_llm, rows, "th", label)[0] for label in LABELS]
    [calibrated] = tiny_llm.classify(PROMPT, LABELS, correction="calibrated", content_free="th")
    shares = np.exp([total - other for (total, _), other in zip(want, empty, strict=True)])
    np.testing.assert_allclose(list(calibrated.probabilities.values()), shares / shares.sum(), atol=1e-4)
    np.testing.assert_allclose(calibrated.logprobs, [total for total, _ in want], atol=1e-4)


def test_a_conversation_is_answered_after_its_layout(tiny_llm: LLM, rows: Any) -> None:
    [found] = tiny_llm.classify(TALK, ["the dog", "of"])
    text: Any = tiny_llm.text
    laid_out = text.encode("user: the cat\nassistant:", add_special_tokens=False).tolist()
    want = [
        whole(rows, laid_out, text.encode(one, add_special_tokens=False).tolist())
        for one in ("the dog", "of")
    ]
    np.testing.assert_allclose(found.logprobs, want, atol=1e-4)
    many: Any = tiny_llm.classify([TALK, TALK], ["the dog", "of"])
    assert [one.label for one in many] == [found.label] * 2


def test_documents_are_ranked_as_the_published_code_ranks_them(tiny_llm: LLM, rows: Any) -> None:
    """https://huggingface.co/Qwen/Qwen3-Reranker-0.6B: softmax of the last row's logits of no and yes."""
    documents, text = ["the cat", "a dog and a cat", ""], tiny_llm.text
    layout = {"template": ("th ", "{query}: {document}", " the"), "labels": (" a", " o")}
    (yes,), (no,) = (text.encode(label, add_special_tokens=False).tolist() for label in (" a", " o"))
    want = []
    for document in documents:
        parts = ("th ", f"the: {document}", " the")
        ids = [
            token_id for part in parts for token_id in text.encode(part, add_special_tokens=False).tolist()
        ]
        last = rows(ids)[-1]
        want.append(np.exp(last[yes]) / (np.exp(last[yes]) + np.exp(last[no])))
    np.testing.assert_allclose(tiny_llm.rerank("the", documents, **layout), want, atol=1e-5)


def test_the_layout_by_default_is_the_published_one() -> None:
    laid_out = RERANK_BEFORE + RERANK_PAIR.format(task=RERANK_TASK, query="q", document="d") + RERANK_AFTER
    assert laid_out.startswith("<|im_start|>system\nJudge whether the Document meets the requirements")
    assert laid_out.endswith("<Document>: d<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_grade_is_a_distribution(tiny_llm: LLM) -> None:
    [judged] = tiny_llm.judge(TALK)
    shares = np.array(list(judged.grades.probabilities.values()))
    mean = float(shares @ np.arange(1, 6))
    assert judged.expectation == pytest.approx(mean)
    assert judged.spread == pytest.approx(float(np.sqrt(shares @ (np.arange(1, 6) - mean) ** 2)))
    assert judged.off_scale == pytest.approx(1 - judged.grades.mass)
    assert len(tiny_llm.judge(["a", "the"], scale=[1, 2.5, 3])) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([], "must be a list of texts"),
        ("yes", "must be a list of texts"),
        (["yes", ""], "has no text or an empty one"),
        (["yes", "no", "yes"], "must be unique; duplicates: 'yes'"),
        (["yes", "yes, sir"], "'yes' (yes) is a prefix of 'yes, sir' (yes, sir)"),
        ({"a": ["x", "y"], "b": "x"}, "'x' (a) equals 'x' (b)"),
        ({"a": []}, "has no text or an empty one"),
        (["1", "2", "10"], "'1' (1) is a prefix of '10' (10)"),
        (["yes", 5], "must be a text"),
        ({"a": "\ud800"}, "is not valid Unicode"),
    ],
)
def test_labels_that_overlap_are_named(labels: Any, said: str) -> None:
    with raises(ParameterError, parameter="labels") as caught:
        texts_of(labels)
    assert said in str(caught.value)


def test_what_cannot_be_asked_is_named(tiny_llm: LLM) -> None:
    with raises(ParameterError, parameter="correction"):
        tiny_llm.classify("a", ["b", "c"], correction="none of these")  # type: ignore[arg-type]
    with raises(ParameterError, parameter="scale"):
        tiny_llm.judge("a", scale=[1])
    with raises(ParameterError, parameter="content_free"):
        tiny_llm.classify("a", ["b", "c"], content_free="N/A")
    for prompts in ([], 5, ["a", []]):
        with raises(ParameterError, parameter="prompts"):
            tiny_llm.classify(prompts, ["b", "c"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "scale",
    [
        *([1], [], [2, 2], [0, -0.0], [1, 1.0], [1234567, 1234568]),
        *([1, float("inf")], [1, float("nan")], [1, 10**400], [1, "2"], [False, True], "12", 5),
    ],
    ids=str,
)
def test_a_scale_that_is_none_is_named(tiny_llm: LLM, scale: Any) -> None:
    with raises(ParameterError, parameter="scale"):
        tiny_llm.judge("a", scale=scale)


@pytest.mark.parametrize(
    ("parameter", "asked"),
    [
        ("documents", {"documents": "text"}),
        ("documents", {"documents": ["a", 5]}),
        ("documents", {"documents": ["\ud800"]}),
        ("query", {"query": None}),
        ("query", {"query": "\ud800"}),
        ("task", {"task": 5}),
        ("labels", {"labels": ["yes"]}),
        ("labels", {"labels": ["yes", "yes, sir"]}),
        ("labels", {"labels": ["yes", "\ud800"]}),
        ("template", {"template": "{query}{document}"}),
        ("template", {"template": ["", "{query}", ""]}),
        ("template", {"template": ["", "{query}{document}{document}", ""]}),
        ("template", {"template": ["", "{query}{document}", 5]}),
    ],
)
def test_a_layout_that_cannot_be_used_is_named(tiny_llm: LLM, parameter: str, asked: dict[str, Any]) -> None:
    with raises(ParameterError, parameter=parameter):
        tiny_llm.rerank(**{"query": "the", "documents": ["cat"], **asked})


def test_braces_of_a_query_and_a_document_stay_as_they_are(tiny_llm: LLM, rows: Any) -> None:
    query, document, text = "{document} {", "{task}} {0.__class__}", tiny_llm.text
    layout = {"template": ("", "{query}|{document}|{}", ""), "labels": (" a", " o")}
    ids = text.encode(f"{query}|{document}|{{}}", add_special_tokens=False).tolist()
    (yes,), (no,) = (text.encode(label, add_special_tokens=False).tolist() for label in (" a", " o"))
    last = rows(ids)[-1]
    want = np.exp(last[yes]) / (np.exp(last[yes]) + np.exp(last[no]))
    assert tiny_llm.rerank(query, [document], **layout) == pytest.approx([want], abs=1e-5)


@pytest.fixture(scope="module", params=["digit by digit", "10 is a token"])
def grader(request: pytest.FixtureRequest, tiny_model_folder: Path, tmp_path_factory: Any) -> Iterator[LLM]:
    """The tiny Llama, with a tokenizer without two-digit numbers, and with "10" as a token."""
    folder = shutil.copytree(tiny_model_folder, tmp_path_factory.mktemp("grader") / "model")
    if request.param == "10 is a token":
        file = folder / "tokenizer.json"
        known = json.loads(file.read_text())
        model = known["model"]
        unused = "".join(model["merges"][-1])
        model["merges"][-1] = ["1", "0"]
        model["vocab"]["10"] = model["vocab"].pop(unused)
        file.write_text(json.dumps(known))
    with LLM(str(folder), kv_cache_memory_bytes=1 << 21) as llm:
        assert len(llm.text.encode("10", add_special_tokens=False)) == (1 if "token" in request.param else 2)
        yield llm


def read_out(llm: LLM, rows: Any, before: list[int], texts: list[str]) -> dict[str, float]:
    """Return grade probabilities over all tokenizations; a text counts as the longest grade it spells."""
    vocabulary = llm.text.vocabulary
    pieces = [vocabulary.token_bytes(token_id) for token_id in range(len(vocabulary))]
    grades = [text.encode() for text in texts]
    found = dict.fromkeys(texts, 0.0)

    def walk(ids: list[int], said: bytes, logprob: float, spelt: bytes | None) -> None:
        spelt = said if said in grades else spelt
        if not any(grade.startswith(said) and grade != said for grade in grades):
            if spelt is not None:
                found[spelt.decode()] += np.exp(logprob)
            return
        for token_id, more in enumerate(rows([*before, *ids])[-1][: len(pieces)]):
            walk([*ids, token_id], said + pieces[token_id], logprob + more, spelt)

    walk([], b"", 0.0, None)
    return found


@pytest.mark.parametrize("scale", [range(1, 11), [1, 10, 100], [0, 0.5, 1], [-1, -10, 1]], ids=str)
def test_a_grade_that_begins_another_is_what_goes_on_otherwise(
    grader: LLM, rows: Any, scale: Sequence[float]
) -> None:
    [judged] = grader.judge(TALK, scale=scale)
    before = grader.text.encode("user: the cat\nassistant:", add_special_tokens=False).tolist()
    want = read_out(grader, rows, before, list(judged.grades.labels))
    assert judged.grades.labels[0] == f"{scale[0]:g}"
    np.testing.assert_allclose(np.exp(judged.grades.logprobs), list(want.values()), rtol=2e-4)
    total = sum(want.values())
    mean = sum(share * grade for share, grade in zip(want.values(), scale, strict=True)) / total
    assert judged.expectation == pytest.approx(mean, rel=1e-4)
    assert judged.off_scale == pytest.approx(1 - total, abs=1e-5)


def test_a_text_is_graded_as_a_conversation_is(grader: LLM, rows: Any) -> None:
    [judged] = grader.judge("the cat and", scale=range(1, 11))
    before = grader.text.encode("the cat and").tolist()
    want = read_out(grader, rows, before, list(judged.grades.labels))
    np.testing.assert_allclose(np.exp(judged.grades.logprobs), list(want.values()), rtol=2e-4)


# -- tokens that span the end of the prompt -----------------------------------------------------------------


def covered(rows: Any, pieces: list[bytes], given: list[int], data: bytes) -> float:
    """Return the log-probability of all token sequences that cover `data` and may extend beyond it."""
    last = rows(given)[-1]
    found = [last[token_id] for token_id, piece in enumerate(pieces) if piece and piece.startswith(data)]
    for token_id, piece in enumerate(pieces):
        if piece and piece != data and data.startswith(piece):
            found.append(last[token_id] + covered(rows, pieces, [*given, token_id], data[len(piece) :]))
    return float(np.logaddexp.reduce(found)) if found else -np.inf


def plain_pieces(llm: LLM) -> list[bytes]:
    vocabulary, special = llm.text.vocabulary, llm.text.special_token_ids
    return [b"" if i in special else vocabulary.token_bytes(i) for i in range(len(vocabulary))]


def test_labels_are_measured_by_bytes_where_a_token_spans_the_prompts_end(tiny_llm: LLM, rows: Any) -> None:
    labels = ["t and", "n of", "r", "t o"]
    [found] = tiny_llm.classify("the ca", labels)
    pieces, given = plain_pieces(tiny_llm), tiny_llm.text.encode("the").tolist()
    tail = covered(rows, pieces, given, b" ca")
    want = [covered(rows, pieces, given, f" ca{label}".encode()) - tail for label in labels]
    assert found.boundary == "bytes"
    np.testing.assert_allclose(found.logprobs, want, rtol=1e-6)
    assert found.mass == pytest.approx(np.exp(want).sum(), abs=1e-6)
    [plain] = tiny_llm.classify("the ca", ["s", "r"])
    assert plain.boundary == "token"


def test_labels_that_cover_all_bytes_have_the_mass_of_one(tiny_llm: LLM) -> None:
    """After "the ca" follows one byte or the end, so all bytes together have nearly all the mass."""
    labels = [chr(code) for code in range(0x20, 0x7F)]
    [found] = tiny_llm.classify("the ca", labels)
    assert (found.boundary, found.mass < 1) == ("bytes", True)
    [more] = tiny_llm.classify("the ca", [*labels, *(chr(code) for code in range(1, 0x20) if code != 10)])
    assert found.mass < more.mass < 1


@pytest.mark.real_model
def test_a_spanning_token_does_not_hide_the_likeliest_label(real_llm: LLM) -> None:
    [found] = real_llm.classify("The capital of Ir", ["an is", "aq is", "eland is"])
    assert (found.label, found.boundary, found.mass < 1) == ("eland is", "bytes", True)


def test_content_free_prompts_are_measured_as_they_are_cut(tiny_llm: LLM) -> None:
    [found] = tiny_llm.classify("the ca", ["t", "r"], correction="calibrated", content_free="a")
    [base] = tiny_llm.classify("a", ["t", "r"])
    np.testing.assert_allclose(found.corrected, found.logprobs - base.logprobs, atol=1e-5)


@pytest.mark.parametrize("scale", [[0, 0.5, 5], [0, 5, 7]], ids=str)
def test_a_grade_may_go_on_from_the_last_token_of_a_prompt(
    grader: LLM, rows: Any, scale: Sequence[float]
) -> None:
    """With "10" as a token, the grade 0 after "the 1" is the rest of that token."""
    [judged] = grader.judge("the cat 1", scale=scale)
    is_spanned = len(grader.text.encode("10", add_special_tokens=False)) == 1
    assert judged.grades.boundary == ("bytes" if is_spanned else "token")
    pieces = plain_pieces(grader)
    given = (
        grader.text.encode("the cat ").tolist() if is_spanned else grader.text.encode("the cat 1").tolist()
    )
    tail = b"1" if is_spanned else b""
    texts = list(judged.grades.labels)
    if not is_spanned:
        want = list(read_out(grader, rows, given, texts).values())
    else:
        sums = {text: covered(rows, pieces, given, tail + text.encode()) for text in texts}
        own = np.exp([sums[text] - covered(rows, pieces, given, tail) for text in texts])
        want = [own[0] - (own[1] if "0.5" in texts else 0.0), *own[1:]]
    np.testing.assert_allclose(np.exp(judged.grades.logprobs), want, rtol=2e-4)


class Told:
    """A model with fixed log-probabilities of each answer's tokens."""

    lora = None

    def __init__(self, llm: LLM, told: dict[str, list[float]]) -> None:
        self.text, self.engine, self._told = llm.text, llm.engine, told

    def score(self, pairs: Sequence[Any], **_: Any) -> list[Any]:
        told = [self._told[self.text.text_of(answer)] for _, answer in pairs]
        return [SimpleNamespace(logprob=sum(values), token_logprobs=values) for values in told]


@pytest.mark.parametrize("over", [0.0, 1e-6])
def test_a_grade_that_always_goes_on_has_no_probability(tiny_llm: LLM, over: float) -> None:
    """A continuation probability above one (by rounding) must not give a negative probability."""
    model: Any = Told(tiny_llm, {"1": [-0.5], "2": [-2.0], "10": [-0.5, over]})
    plan = judge_plan(model.text, TALK, scale=[1, 2, 10])
    [judged] = plan.sum_up(model.score(plan.pairs))
    assert judged.grades.logprobs.tolist() == [-np.inf, -2.0, -0.5 + over]
    assert judged.grades.probabilities["1"] == 0


def test_labels_of_which_none_is_possible_have_no_shares() -> None:
    nothing = np.full(2, -np.inf)
    found = Classification(("a", "b"), nothing, nothing)
    assert found.mass == 0
    assert np.isnan([*found.probabilities.values(), found.margin]).all()
