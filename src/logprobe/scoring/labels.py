"""How likely each of some answers is: labels of a text, documents for a query, grades of a judge.

Before it: an open model and prompts. After it: user code. An answer's probability is that of all its tokens,
one after the other, each after what stands before it; no number comes from the first token alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from logprobe.errors import ParameterError, require
from logprobe.text.chat import as_conversations, read_messages

if TYPE_CHECKING:
    from logprobe.scoring.score import Score
    from logprobe.scoring.scorer import Scorer
    from logprobe.text.chat import Conversation

Floats: TypeAlias = npt.NDArray[np.float64]
Labels: TypeAlias = "Sequence[str] | Mapping[str, str | Sequence[str]]"
Asked: TypeAlias = "str | Conversation"
"""A text that the label goes on with, or a conversation that it answers."""
Correction: TypeAlias = Literal["none", "length", "calibrated"]
CORRECTIONS: Final = ("none", "length", "calibrated")
CONTENT_FREE: Final = "N/A"

# https://huggingface.co/Qwen/Qwen3-Reranker-0.6B, as its page lays a pair out.
RERANK_TASK: Final = "Given a web search query, retrieve relevant passages that answer the query"
RERANK_BEFORE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
RERANK_AFTER: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
RERANK_PAIR: Final = "<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
YES, NO = "yes", "no"


@dataclass(frozen=True, slots=True)
class Classification:
    """What a model gives each label of one prompt; nats."""

    labels: tuple[str, ...]
    logprobs: Floats  # (L,) of each label as it is, its texts together: log P(one of its texts | prompt)
    corrected: Floats  # (L,) what the correction makes of them; `logprobs` themselves without one

    @property
    def probabilities(self) -> dict[str, float]:
        """Label → its share of all labels, by `corrected`; they sum to one."""
        shares = np.exp(self.corrected - np.logaddexp.reduce(self.corrected))
        return dict(zip(self.labels, shares.tolist(), strict=True))

    @property
    def label(self) -> str:
        """The most probable one; of equal ones the first."""
        return self.labels[int(self.corrected.argmax())]

    @property
    def mass(self) -> float:
        """The probability that the model says any of the labels; the rest is anything else."""
        return float(np.exp(np.logaddexp.reduce(self.logprobs)))

    @property
    def margin(self) -> float:
        """How far the best stands above the second, nats; infinite where it is alone."""
        ordered = np.sort(self.corrected)
        return float(ordered[-1] - ordered[-2]) if len(ordered) > 1 else float("inf")

    def __repr__(self) -> str:
        shares = ", ".join(f"{label!r}: {share:.3f}" for label, share in self.probabilities.items())
        return f"<Classification: {{{shares}}}, mass {self.mass:.3f}>"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a model that gives a grade thinks: its whole distribution over the grades."""

    grades: Classification
    scale: tuple[float, ...]

    @property
    def expectation(self) -> float:
        """The mean grade, by each one's share."""
        return float(np.dot(self._shares(), self.scale))

    @property
    def spread(self) -> float:
        """The standard deviation of the grade."""
        return float(np.sqrt(np.dot(self._shares(), (np.array(self.scale) - self.expectation) ** 2)))

    @property
    def off_scale(self) -> float:
        """The probability that the answer is no grade."""
        return max(1.0 - self.grades.mass, 0.0)

    def _shares(self) -> Floats:
        return np.array(list(self.grades.probabilities.values()))


def classify(
    llm: Scorer,
    prompts: Asked | Sequence[Asked],
    labels: Labels,
    *,
    correction: Correction = "none",
    content_free: Asked | None = None,
    progress: bool = False,
) -> Classification | list[Classification]:
    """How likely each label is after a prompt, or after each of many; see `LLM.classify`."""
    require(
        correction in CORRECTIONS,
        "correction",
        f"must be one of {', '.join(CORRECTIONS)}, got {correction!r}",
    )
    named = texts_of(labels)
    many = _as_many(prompts)
    calibrated = correction == "calibrated"
    empty: list[Asked] = [CONTENT_FREE if content_free is None else content_free] if calibrated else []
    scores = _scored(llm, [*many, *empty], named, progress=progress)
    base = _sums(scores.pop(), named) if calibrated else None
    found = [_classified(of_prompt, named, correction, base) for of_prompt in scores]
    return found[0] if _is_one(prompts) else found


def rerank(
    llm: Scorer,
    query: str,
    documents: Sequence[str],
    *,
    task: str = RERANK_TASK,
    template: tuple[str, str, str] = (RERANK_BEFORE, RERANK_PAIR, RERANK_AFTER),
    labels: tuple[str, str] = (YES, NO),
    progress: bool = False,
) -> list[float]:
    """How relevant each document is to a query, in [0, 1]: P(yes) / (P(yes) + P(no)); see `LLM.rerank`."""
    is_list = isinstance(documents, Sequence) and not isinstance(documents, str)
    require(
        is_list and all(isinstance(one, str) for one in documents), "documents", "must be a list of texts"
    )
    before, pair, after = template
    named = texts_of(labels)

    def ids(document: str) -> list[int]:
        middle = pair.format(task=task, query=query, document=document)
        parts = (llm.text.encode(part, add_special_tokens=False).tolist() for part in (before, middle, after))
        return [token_id for part in parts for token_id in part]

    answers = [llm.text.encode(text, add_special_tokens=False).tolist() for [text] in named.values()]
    pairs = [(ids(document), answer) for document in documents for answer in answers]
    sums = np.array([score.logprob for score in llm.score(pairs, progress=progress)]).reshape(-1, 2)
    return np.exp(sums[:, 0] - np.logaddexp(sums[:, 0], sums[:, 1])).tolist()  # type: ignore[no-any-return]


def judge(
    llm: Scorer,
    prompts: Asked | Sequence[Asked],
    scale: Sequence[float] = range(1, 6),
    *,
    progress: bool = False,
) -> Judgement | list[Judgement]:
    """The whole distribution of a grade; see `LLM.judge`."""
    require(len(scale) > 1, "scale", f"must have two grades or more, got {list(scale)}")
    labels = [f"{grade:g}" for grade in scale]
    try:
        texts_of(labels)
    except ParameterError as error:
        what = str(error).removeprefix("labels: ").partition(";")[0]
        remedy = "take grades of one length (0 to 9), or ask for grades as texts by classify"
        raise ParameterError("scale", f"{what}; {remedy}") from error
    found = classify(llm, prompts, labels, progress=progress)
    grades = tuple(map(float, scale))
    if isinstance(found, Classification):
        return Judgement(found, grades)
    return [Judgement(one, grades) for one in found]


def texts_of(labels: Labels) -> dict[str, list[str]]:
    """Label → its texts, none of which begins another label's.

    Raises:
        ParameterError: no labels, an empty text, equal ones, or one that begins another.
    """
    is_list = isinstance(labels, Sequence | Mapping) and not isinstance(labels, str)
    require(is_list and len(labels) > 0, "labels", "must be a list of texts, or texts by name", got=labels)
    if isinstance(labels, Mapping):
        named = {name: [texts] if isinstance(texts, str) else list(texts) for name, texts in labels.items()}
    else:
        twice = [label for place, label in enumerate(labels) if label in labels[:place]]
        require(not twice, "labels", f"two are equal: {', '.join(map(repr, twice))}")
        named = {text: [text] for text in labels}
    for name, texts in named.items():
        is_said = bool(texts) and all(isinstance(text, str) and text for text in texts)
        require(is_said, "labels", f"{name!r} has an empty text, or none")
    owners = [(text, name) for name, texts in named.items() for text in texts]
    for (text, name), (other, other_name) in permutations(owners, 2):
        if other.startswith(text):
            how = "equals" if text == other else "begins"
            what = f"{text!r} ({name}) {how} {other!r} ({other_name}), so it would count for both"
            raise ParameterError("labels", f"{what}; end it otherwise, such as with a full stop")
    return named


def _is_one(prompts: Asked | Sequence[Asked]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Mapping))


def _as_many(prompts: Asked | Sequence[Asked]) -> list[Asked]:
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, bytes)
    require(
        is_list and len(prompts) > 0,
        "prompts",
        "must be a text, a conversation, or a list of these",
        got=prompts,
    )
    many: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
    return many


def _scored(
    llm: Scorer, prompts: list[Asked], named: Mapping[str, list[str]], *, progress: bool
) -> list[list[Score]]:
    """The scores of all labels' texts after each prompt; a prompt that they share is run once."""
    texts = [text for texts in named.values() for text in texts]
    pairs: list[tuple[Any, Any]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            pairs += [(prompt, text) for text in texts]
            continue
        [conversation] = as_conversations(prompt)
        ids = read_messages(conversation, llm.text).tolist()
        pairs += [(ids, llm.text.encode(text, add_special_tokens=False).tolist()) for text in texts]
    scores = llm.score(pairs, progress=progress)
    return [scores[start : start + len(texts)] for start in range(0, len(scores), len(texts))]


def _classified(
    scores: Sequence[Score], named: Mapping[str, list[str]], correction: Correction, base: Floats | None
) -> Classification:
    logprobs = corrected = _sums(scores, named)
    if correction == "length":
        corrected = _sums(scores, named, per_token=True)
    elif base is not None:
        corrected = logprobs - base
    return Classification(tuple(named), logprobs, corrected)


def _sums(scores: Sequence[Score], named: Mapping[str, list[str]], *, per_token: bool = False) -> Floats:
    """Log of the probability of any of a label's texts, (L,); or of their geometric means a token."""
    numbers = iter([score.logprob_per_token if per_token else score.logprob for score in scores])
    return np.array([np.logaddexp.reduce([next(numbers) for _ in texts]) for texts in named.values()])
