"""Probabilities of candidate answers: classification labels, relevance of documents, grades from a judge.

A `Plan` lists the pairs to score and computes the result from the scores. Blocking and async callers use the
same plans. The probability of an answer is the product of all its tokens' probabilities, not just the first
token's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Real
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from logprobe.analysis import measures
from logprobe.analysis.classification import Classification
from logprobe.errors import ParameterError, require
from logprobe.text.boundary import Split, split_texts
from logprobe.text.chat import as_conversations, read_messages
from logprobe.text.edge import as_token_ids
from logprobe.text.prompts import is_prompt_dict, plain_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.analysis.confidence import FittedConfidence
    from logprobe.analysis.score import Score
    from logprobe.records.values import IntArray
    from logprobe.text.boundary import Boundary, Pair
    from logprobe.text.chat import Conversation
    from logprobe.text.edge import TextEdge
    from logprobe.text.prompts import Prompt

    ReadMessages: TypeAlias = Callable[[Conversation], IntArray]

T = TypeVar("T")
Floats: TypeAlias = npt.NDArray[np.float64]
Labels: TypeAlias = "Sequence[str] | Mapping[str, str | Sequence[str]]"
Asked: TypeAlias = "Prompt | Conversation"
"""A prompt that the label continues, or a conversation that the label answers."""
Correction: TypeAlias = Literal["none", "length", "calibrated"]
CORRECTIONS: Final = ("none", "length", "calibrated")
CONTENT_FREE: Final = "N/A"
SCALE: Final = range(1, 6)
LARGEST_GRADE: Final = 999_999  # "%g" writes larger numbers with an exponent

# Prompt format of the model card https://huggingface.co/Qwen/Qwen3-Reranker-0.6B.
RERANK_TASK: Final = "Given a web search query, retrieve relevant passages that answer the query"
RERANK_BEFORE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
RERANK_AFTER: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
RERANK_PAIR: Final = "<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
RERANK_TEMPLATE: Final = (RERANK_BEFORE, RERANK_PAIR, RERANK_AFTER)
YES_NO: Final = ("yes", "no")


@dataclass(frozen=True, slots=True)
class Judgement:
    """The distribution of a judge model over the grades of a scale."""

    grades: Classification
    scale: tuple[float, ...]

    @property
    def expectation(self) -> float:
        """Mean of the grade, over the normalized probabilities of all grades."""
        return float(np.dot(self._shares(), self.scale))

    @property
    def spread(self) -> float:
        """Standard deviation of the grade."""
        return float(np.sqrt(np.dot(self._shares(), (np.array(self.scale) - self.expectation) ** 2)))

    @property
    def off_scale(self) -> float:
        """Probability of an answer that is not a grade."""
        return max(1.0 - self.grades.mass, 0.0)

    def _shares(self) -> Floats:
        return np.array(list(self.grades.probabilities.values()))


@dataclass(frozen=True, slots=True)
class Plan(Generic[T]):
    """Pairs to score, and a function that computes the result from the scores, given in the pairs' order."""

    pairs: list[Pair]
    sum_up: Callable[[Sequence[Score]], T]


# -- labels --------------------------------------------------------------------------------------------------


def classify_plan(
    edge: TextEdge,
    prompts: Asked | Sequence[Asked],
    labels: Labels,
    *,
    correction: Correction = "none",
    content_free: Asked | None = None,
    confidence: FittedConfidence | None = None,
    read: ReadMessages | None = None,
) -> Plan[list[Classification]]:
    """Plan `LLM.classify`: pair each prompt, and then the content-free prompt, with each text of each label.

    `read` converts conversations to ids; None uses the model's chat template.
    """
    known = f"must be one of {', '.join(CORRECTIONS)}, got {correction!r}"
    require(correction in CORRECTIONS, "correction", known)
    named = texts_of(labels)
    texts = [text for texts in named.values() for text in texts]
    if confidence is not None:
        from logprobe.analysis.confidence import FittedConfidence

        known = "must be a FittedConfidence, which calibrate and FittedConfidence.load return"
        require(isinstance(confidence, FittedConfidence), "confidence", known, got=confidence)
        confidence.check_labels(tuple(named))
    is_calibrated = correction == "calibrated"
    remedy = "requires correction='calibrated'; set that, or leave it out"
    require(is_calibrated or content_free is None, "content_free", remedy)
    empty: list[Asked] = [CONTENT_FREE if content_free is None else content_free] if is_calibrated else []
    laid_out = [_pairs(edge, prompt, texts, read) for prompt in [*_as_many(prompts), *empty]]

    def sum_up(scores: Sequence[Score]) -> list[Classification]:
        each = _in_parts(scores, laid_out)
        base = _sums(each.pop(), named) if is_calibrated else None
        found = [
            _classified(of_prompt, named, correction, base, _boundary(pairs))
            for pairs, of_prompt in zip(laid_out[: len(each)], each, strict=True)
        ]
        return (
            found if confidence is None else [replace(one, confidence=confidence.apply(one)) for one in found]
        )

    return Plan([pair for pairs in laid_out for pair in pairs], sum_up)


def texts_of(labels: Labels) -> dict[str, list[str]]:
    """Validate labels and return the texts of each label by name.

    Raises:
        ParameterError: there are no labels, a label has no text, a text is empty, or a text equals another
            text or is a prefix of one.
    """
    is_list = isinstance(labels, Sequence | Mapping) and not isinstance(labels, str)
    require(is_list and len(labels) > 0, "labels", "must be a list of texts, or texts by name", got=labels)
    if isinstance(labels, Mapping):
        named = {name: [texts] if isinstance(texts, str) else list(texts) for name, texts in labels.items()}
    else:
        twice = [label for label, count in Counter(_checked_texts(labels, "labels")).items() if count > 1]
        require(not twice, "labels", f"must be unique; duplicates: {', '.join(map(repr, twice))}")
        named = {text: [text] for text in labels}
    for name, texts in named.items():
        is_said = bool(texts) and all(_checked_texts(texts, "labels"))
        require(is_said, "labels", f"{name!r} has no text or an empty one")
    _check_apart([(text, name) for name, texts in named.items() for text in texts])
    return named


def _check_apart(owners: list[tuple[str, str]]) -> None:
    """Reject a text that is a prefix of another text.

    In sorted order, comparing neighbors is enough to find such a text.
    """
    for (text, name), (other, other_name) in pairwise(sorted(owners, key=itemgetter(0))):
        if other.startswith(text):
            how = "equals" if text == other else "is a prefix of"
            what = f"{text!r} ({name}) {how} {other!r} ({other_name}), so the second would count for both"
            raise ParameterError("labels", f"{what}; change the first, for example by adding a full stop")


def calibrated(found: Classification, base: Classification) -> Classification:
    """Divide the probabilities by the ones after a content-free prompt, `base` (Zhao et al. 2021)."""
    return replace(found, corrected=found.logprobs - base.logprobs)


def _classified(
    scores: Sequence[Score],
    named: Mapping[str, list[str]],
    correction: Correction,
    base: Floats | None,
    boundary: Boundary,
) -> Classification:
    logprobs = corrected = _sums(scores, named)
    if correction == "length":
        corrected = _sums(scores, named, per_token=True)
    elif base is not None:
        corrected = logprobs - base
    return Classification(tuple(named), logprobs, corrected, boundary)


def _sums(scores: Sequence[Score], named: Mapping[str, list[str]], *, per_token: bool = False) -> Floats:
    """Return, for each label, the log of the total probability of the label's texts, (L,) nats.

    With `per_token`, each text counts with its mean log-probability per token.
    """
    numbers = iter([score.mean_logprob if per_token else score.logprob for score in scores])
    return np.array([np.logaddexp.reduce([next(numbers) for _ in texts]) for texts in named.values()])


# -- documents -----------------------------------------------------------------------------------------------


def rerank_plan(
    edge: TextEdge,
    query: str,
    documents: Sequence[str],
    *,
    task: str = RERANK_TASK,
    template: Sequence[str] = RERANK_TEMPLATE,
    labels: Sequence[str] = YES_NO,
) -> Plan[list[float]]:
    """Plan `rerank`: pair each document's prompt with both labels.

    Raises:
        ParameterError: an argument is not text, one label is a prefix of the other, or the template is
            invalid.
    """
    is_list = isinstance(documents, Sequence) and not isinstance(documents, str)
    require(is_list, "documents", "must be a list of texts", got=documents)
    _checked_texts(documents, "documents")
    check_layout(query, task, template, labels)
    before, pair, after = template
    answers = [edge.encode(text, add_special_tokens=False) for text in labels]
    first, last = (edge.encode(part, add_special_tokens=False) for part in (before, after))

    def ids(document: str) -> IntArray:
        middle = _filled(pair, {"task": task, "query": query, "document": document})
        return np.concatenate([first, edge.encode(middle, add_special_tokens=False), last])

    def sum_up(scores: Sequence[Score]) -> list[float]:
        sums = np.array([score.logprob for score in scores]).reshape(-1, 2)
        with np.errstate(invalid="ignore"):
            relevant: list[float] = np.exp(sums[:, 0] - np.logaddexp(sums[:, 0], sums[:, 1])).tolist()
        return relevant

    asked = map(ids, documents)
    return Plan([(before_ids, answer) for before_ids in asked for answer in answers], sum_up)


def check_layout(query: str, task: str, template: Sequence[str], labels: Sequence[str]) -> None:
    """Validate query, task, template and labels; raises the errors of `rerank_plan`."""
    _checked_texts([query], "query")
    _checked_texts([task], "task")
    is_list = isinstance(labels, Sequence) and not isinstance(labels, str)
    require(is_list and len(labels) == 2, "labels", "must be two texts, such as yes and no")
    texts_of(labels)
    is_list = isinstance(template, Sequence) and not isinstance(template, str)
    known = "must be three texts: before the pair, the pair, and after the pair"
    require(is_list and len(template) == 3, "template", known)
    _checked_texts(template, "template")
    counts = [template[1].count(f"{{{name}}}") for name in ("query", "document", "task")]
    is_whole = counts[:2] == [1, 1] and counts[2] <= 1
    known = "must have {query} and {document} once each in its second text, and {task} at most once"
    require(is_whole, "template", known)


def _filled(pair: str, values: Mapping[str, str]) -> str:
    """Fill in the template's placeholders; braces in the values are left as they are."""
    return re.sub("{(task|query|document)}", lambda place: values[place[1]], pair)


# -- grades --------------------------------------------------------------------------------------------------


Key: TypeAlias = tuple[int, bytes]
"""Number of prompt tokens, and the bytes of all token ids (int32) of the prompt and the answer."""


TokenPair: TypeAlias = "tuple[IntArray, IntArray]"
"""Token ids of a prompt and of an answer."""


class Spelling(NamedTuple):
    """A tokenization of a grade after a prompt."""

    grade: int  # index of the grade on the scale
    pair: Pair
    begun_by: int | None  # index of the longest other spelling that is a proper prefix of this spelling


def judge_plan(
    edge: TextEdge,
    prompts: Asked | Sequence[Asked],
    scale: Sequence[float] = SCALE,
    *,
    read: ReadMessages | None = None,
) -> Plan[list[Judgement]]:
    """Plan `LLM.judge`: pair each prompt with each spelling of each grade.

    An answer counts as the longest grade that it starts with: "10" is never counted as "1".
    """
    grades = grades_of(scale)
    texts = list(grades)
    laid_out = [_spellings(edge, _pairs(edge, prompt, texts, read), texts) for prompt in _as_many(prompts)]

    def sum_up(scores: Sequence[Score]) -> list[Judgement]:
        judged = []
        for spellings, of_prompt in zip(laid_out, _in_parts(scores, laid_out), strict=True):
            logprobs = _grade_logprobs(spellings, of_prompt, len(texts))
            boundary = _boundary([spelling.pair for spelling in spellings])
            found = Classification(tuple(texts), logprobs, logprobs, boundary)
            judged.append(Judgement(found, tuple(grades.values())))
        return judged

    return Plan([spelling.pair for spellings in laid_out for spelling in spellings], sum_up)


def grades_of(scale: Sequence[float]) -> dict[str, float]:
    """Validate a scale and return each grade's number by its text, in the order of the scale.

    Raises:
        ParameterError: the scale has fewer than two grades, two equal grades, or a value that is not a number
            of at most 999,999 in magnitude.
    """
    is_list = isinstance(scale, Sequence | np.ndarray) and not isinstance(scale, str | bytes)
    require(
        is_list and len(scale) > 1, "scale", "must have at least two grades, such as [1, 2, 3]", got=scale
    )
    for grade in scale:
        is_number = isinstance(grade, Real) and not isinstance(grade, bool)
        is_written = is_number and abs(grade) <= LARGEST_GRADE
        require(is_written, "scale", f"must be numbers of at most {LARGEST_GRADE:,}", got=grade)
    numbers = [float(grade) + 0.0 for grade in scale]  # turns -0.0 into 0.0
    texts = [f"{number:g}" for number in numbers]
    twice = dict.fromkeys(text for place, text in enumerate(texts) if text in texts[:place])
    remedy = "use each grade once, with at most six digits"
    require(not twice, "scale", f"must be unique; duplicates: {', '.join(map(repr, twice))}; {remedy}")
    return dict(zip(texts, numbers, strict=True))


def _spellings(edge: TextEdge, pairs: Sequence[Pair], texts: Sequence[str]) -> list[Spelling]:
    """Return the spellings to score: the tokenizer's, and those that start with a shorter grade's ids.

    If 10 and 1 are grades, the spellings of 10 are the tokenizer's ids of "10" and, if they differ, the ids
    of "1" followed by the ids of "0". With byte-level scores, one spelling per grade covers all
    tokenizations.
    """
    by_tokens = [pair for pair in pairs if not isinstance(pair, Split)]
    if len(by_tokens) < len(pairs):
        return [Spelling(place, pair, _begun_by_text(place, texts)) for place, pair in enumerate(pairs)]
    ways: dict[Key, tuple[int, TokenPair]] = {}
    for grade, pair in (*enumerate(by_tokens), *_further_ways(edge, by_tokens, texts)):
        ways.setdefault(_key(pair), (grade, pair))
    places = {key: place for place, key in enumerate(ways)}
    return [Spelling(grade, pair, _begun_by(pair, places)) for grade, pair in ways.values()]


def _begun_by_text(place: int, texts: Sequence[str]) -> int | None:
    """Return the index of the longest other text that is a prefix of text number `place`, or None."""
    begun = [other for other, text in enumerate(texts) if other != place and texts[place].startswith(text)]
    return max(begun, key=lambda other: len(texts[other]), default=None)


def _further_ways(
    edge: TextEdge, pairs: Sequence[TokenPair], texts: Sequence[str]
) -> list[tuple[int, TokenPair]]:
    ways: list[tuple[int, TokenPair]] = []
    grades = {text: grade for grade, text in enumerate(texts)}
    for longer, text in enumerate(texts):
        for size in range(1, len(text)):
            shorter = grades.get(text[:size])
            if shorter is None or _goes_on(pairs[longer], pairs[shorter]):
                continue
            rest = edge.encode(text[size:], add_special_tokens=False)
            # Some tokenizers put a space before every text that they encode.
            if edge.vocabulary.bytes_of(rest.tolist()) == text[size:].encode():
                before, after = pairs[shorter]
                ways.append((longer, (before, np.concatenate([after, rest]))))
    return ways


def _goes_on(longer: TokenPair, shorter: TokenPair) -> bool:
    """Return True if the prompts are equal and the answer ids of `longer` start with those of `shorter`."""
    size = len(shorter[1])
    return np.array_equal(longer[0], shorter[0]) and np.array_equal(longer[1][:size], shorter[1])


def _begun_by(pair: TokenPair, places: Mapping[Key, int]) -> int | None:
    before, after = pair
    begun = (places.get(_key((before, after[:size]))) for size in range(len(after) - 1, 0, -1))
    return next((place for place in begun if place is not None), None)


def _key(pair: TokenPair) -> Key:
    return len(pair[0]), np.concatenate(pair).astype(np.int32).tobytes()


def _grade_logprobs(spellings: Sequence[Spelling], scores: Sequence[Score], num_grades: int) -> Floats:
    """Return the log-probability, (num_grades,) nats, that an answer is each grade and not a longer one.

    If the ids of 10 start with the ids of 1, then P(1 alone) = P(1) · (1 - P(0 | 1)). P(0 | 1) is read from
    the token logprobs of 10, because the difference between two scores may be affected by rounding.
    """
    goes_on = np.zeros(len(spellings))
    for spelling, score in zip(spellings, scores, strict=True):
        if spelling.begun_by is not None:
            further = _further_logprob(score, scores[spelling.begun_by], spellings[spelling.begun_by].pair)
            goes_on[spelling.begun_by] += np.exp(further)
    with np.errstate(divide="ignore"):
        alone = np.array([score.logprob for score in scores]) + np.log1p(-np.minimum(goes_on, 1.0))
    logprobs = np.full(num_grades, -np.inf)
    np.logaddexp.at(logprobs, [spelling.grade for spelling in spellings], alone)
    return logprobs


def _further_logprob(longer: Score, shorter: Score, shorter_pair: Pair) -> float:
    """Return log P(rest of the longer answer | shorter answer), in nats."""
    if not isinstance(shorter_pair, Split):
        return measures.total(longer.token_logprobs[len(shorter_pair[1]) :])
    return -np.inf if shorter.logprob == -np.inf else longer.logprob - shorter.logprob


# -- prompts -------------------------------------------------------------------------------------------------


def _is_one(prompts: Asked | Sequence[Asked]) -> bool:
    """Return True if `prompts` is one prompt: a text, a dict, a list of token ids or a conversation."""
    if isinstance(prompts, str | Mapping):
        return True
    first: Any = prompts[0]
    return isinstance(first, int | np.integer) or (isinstance(first, Mapping) and not is_prompt_dict(first))


def _as_many(prompts: Asked | Sequence[Asked]) -> list[Asked]:
    is_list = isinstance(prompts, Sequence | Mapping | np.ndarray) and not isinstance(prompts, bytes)
    require(
        is_list and len(prompts) > 0,
        "prompts",
        "must be a prompt, a conversation, or a list of these",
        got=prompts,
    )
    many: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
    return many


def _pairs(edge: TextEdge, prompt: Asked, texts: Sequence[str], read: ReadMessages | None) -> list[Pair]:
    """Pair a prompt with each text; either all pairs are scored by tokens, or all by bytes.

    All pairs have the same context, so the engine computes the prompt once.

    Raises:
        ParameterError: the prompt is not a text, token ids or a conversation, or cannot be split from a text.
    """
    plain = plain_prompt(prompt)
    if isinstance(plain, str):
        try:
            return [split.pair for split in split_texts(edge, plain, texts)]
        except ParameterError as error:
            if error.parameter != "context":
                raise
            raise ParameterError("prompts", str(error).removeprefix("context: ")) from error
    is_list = isinstance(plain, Sequence | np.ndarray) and len(plain) > 0
    if is_list and isinstance(plain[0], int | np.integer):
        before = as_token_ids(plain, "prompts")
    else:
        conversations = as_conversations(plain)
        require(len(conversations) == 1, "prompts", "must be prompts or conversations", got=prompt)
        [conversation] = conversations
        before = read_messages(conversation, edge) if read is None else read(conversation)
    return [(before, edge.encode(text, add_special_tokens=False)) for text in texts]


def _boundary(pairs: Sequence[Pair]) -> Boundary:
    """Return "bytes" if any pair is scored by its bytes, otherwise "token"."""
    return "bytes" if any(isinstance(pair, Split) for pair in pairs) else "token"


def _in_parts(scores: Sequence[Score], parts: Sequence[Sequence[Any]]) -> list[list[Score]]:
    """Split a flat list of scores into one list per prompt."""
    remaining = iter(scores)
    return [[next(remaining) for _ in part] for part in parts]


def _checked_texts(texts: Sequence[Any], name: str) -> Sequence[str]:
    """Check that each element is a string that can be encoded as UTF-8, and return `texts`."""
    for text in texts:
        require(isinstance(text, str), name, "must be a text or a list of texts", got=text)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ParameterError(name, f"is not valid Unicode text ({error.reason}); remove it") from error
    return texts
