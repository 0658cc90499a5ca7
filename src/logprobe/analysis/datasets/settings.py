"""What a data set is asked: which columns hold what, how rows are read, and on which machines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from logprobe.analysis.labels import (
    CONTENT_FREE,
    CORRECTIONS,
    RERANK_TASK,
    RERANK_TEMPLATE,
    SCALE,
    YES_NO,
    Correction,
    check_layout,
    grades_of,
    texts_of,
)
from logprobe.config import strict_keywords
from logprobe.engine.truncation import Truncation, check_truncation
from logprobe.errors import require
from logprobe.text.boundary import BoundaryRule, check_rule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logprobe.analysis.labels import Asked

HITS = ("acc", "acc_norm", "acc_bytes")


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which columns hold what, and how rows are read; `Journal` resumes a run with the same alone.

    Args:
        text_column: the text, or the continuation where there is a context.
        context_column: what stands before the text or the choices.
        choices_column: a list of texts, of which the most likely is the answer.
        answer_column: the right choice: its place from 0, its letter from A, or its text.
        keep_columns: columns copied to the output (what is no text as JSON).
        delimiter: what stands between a context and a choice.
        tokens: give each token's id, logprob, rank and entropy.
        unconditional: score each continuation after nothing too, which gives PMI.
        detect: give each text the measures of whether the model has seen it, or a machine has written it.
        label_column: what is known of it: true, false, 1 or 0; the summary then has each measure's AUC.
        bos: put BOS (EOS where there is none) before texts without context; None: as the tokenizer does.
        truncation: what becomes of a row longer than the context: a bad row, its end, or sliding windows.
        window: tokens a window; None: the model's context.
        stride: tokens from one window to the next; None: half a window. A whole one makes them disjoint,
            and the first token of each has no number.
        boundary: how a continuation or choice is measured where a token spans the end of its context: auto,
            by its bytes, or token, as lm-evaluation-harness does.
    """

    text_column: str = "text"
    context_column: str | None = None
    choices_column: str | None = None
    answer_column: str | None = None
    keep_columns: tuple[str, ...] = ()
    delimiter: str = " "
    tokens: bool = False
    unconditional: bool = False
    detect: bool = False
    label_column: str | None = None
    bos: bool | None = None
    truncation: Truncation = "error"
    window: int | None = None
    stride: int | None = None
    boundary: BoundaryRule = "auto"

    def __post_init__(self) -> None:
        check_rule(self.boundary)
        splits = self.boundary == "auto" or self.context_column or self.choices_column
        remedy = "splits a context from what follows; give context_column or choices_column, or leave it out"
        require(splits, "boundary", remedy)
        check_truncation(self.truncation)
        has_choices = self.choices_column is not None
        require(has_choices or self.answer_column is None, "answer_column", "comes with choices_column")
        is_plain = not (has_choices and (self.tokens or self.unconditional or self.detect))
        require(is_plain, "tokens", "and unconditional and detect are for texts, not for choices")
        require(self.detect or self.label_column is None, "label_column", "comes with detect")
        is_cut = self.truncation == "window"
        for name in ("window", "stride"):
            require(is_cut or getattr(self, name) is None, name, "comes with truncation='window'")
        require(not (is_cut and self.unconditional), "unconditional", "has no meaning for windows")

    @property
    def columns(self) -> list[str]:
        """The columns to read, the main one first, none twice."""
        text = [self.text_column] if self.choices_column is None else [self.choices_column]
        others = [self.context_column, self.answer_column, self.label_column]
        return list(
            dict.fromkeys([*text, *(name for name in others if name is not None), *self.keep_columns])
        )

    @property
    def rows(self) -> DataSettings:
        """How rows are read: as these say."""
        return self


class _Prompted:
    """Settings that put each text of a data set in a prompt."""

    prompt: str
    chat: bool
    text_column: str
    keep_columns: tuple[str, ...]

    @property
    def rows(self) -> DataSettings:
        """How rows are read."""
        return DataSettings(text_column=self.text_column, keep_columns=self.keep_columns)

    def asked(self, text: str) -> Asked:
        """Return what the model is asked of a text."""
        filled = self.prompt.replace("{text}", text)
        return [{"role": "user", "content": filled}] if self.chat else filled

    def _check_prompt(self) -> None:
        is_place = self.prompt.count("{text}") == 1
        require(is_place, "prompt", "must hold {text} once, where each text is to stand")


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class LabelSettings(_Prompted):
    """Which labels each text of a data set is given, and how it is asked for them.

    Args:
        labels: the labels, each as the model says it (with its space where it goes on with a text).
        prompt: what is asked of each text, which stands in it as {text}.
        chat: lay the prompt out as a user's message, by the model's chat template.
        correction: what the shares are made of: none, the probabilities themselves; length, their geometric
            mean a token; calibrated, their ratio to those of a text without content.
        content_free: the text without content; None: N/A.
        text_column: the text.
        keep_columns: columns copied to the output (what is no text as JSON).
    """

    labels: tuple[str, ...] = ()
    prompt: str = "{text}"
    chat: bool = False
    correction: Correction = "none"
    content_free: str | None = None
    text_column: str = "text"
    keep_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        texts_of(self.labels)
        known = f"must be one of {', '.join(CORRECTIONS)}, got {self.correction!r}"
        require(self.correction in CORRECTIONS, "correction", known)
        is_calibrated = self.correction == "calibrated"
        require(
            is_calibrated or self.content_free is None, "content_free", "comes with correction='calibrated'"
        )
        self._check_prompt()

    @property
    def empty(self) -> Asked | None:
        """What it is asked of a text without content; None where nothing is corrected by that."""
        if self.correction != "calibrated":
            return None
        return self.asked(CONTENT_FREE if self.content_free is None else self.content_free)


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class JudgeSettings(_Prompted):
    """On which scale a model grades each text of a data set, and how it is asked for the grade.

    Args:
        scale: the grades, each as the model writes it.
        prompt: what is asked of each text, which stands in it as {text}.
        chat: lay the prompt out as a user's message, by the model's chat template.
        text_column: the text.
        keep_columns: columns copied to the output (what is no text as JSON).
    """

    scale: tuple[float, ...] = tuple(SCALE)
    prompt: str = "{text}"
    chat: bool = False
    text_column: str = "text"
    keep_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Plain numbers, whatever they were: a run is resumed where they are the same.
        object.__setattr__(self, "scale", tuple(grades_of(self.scale).values()))
        self._check_prompt()


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class RerankSettings:
    """To which query the documents of a data set are relevant, and how the two are laid out.

    Args:
        query: what is sought, in every document.
        query_column: the column with each document's own query, in the place of one for all.
        task: what makes a document relevant, in words.
        template: what stands before, around and after a pair, three texts, of which the second names {query}
            and {document}, and may name {task}; none: Qwen3-Reranker's.
        labels: what the model says of a relevant document, and of another one.
        text_column: the document.
        keep_columns: columns copied to the output (what is no text as JSON).
    """

    query: str | None = None
    query_column: str | None = None
    task: str = RERANK_TASK
    template: tuple[str, ...] = ()
    labels: tuple[str, ...] = YES_NO
    text_column: str = "text"
    keep_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        is_one = (self.query is None) != (self.query_column is None)
        require(is_one, "query", "give either a query or a query_column")
        check_layout(self.query or "", self.task, self.template or RERANK_TEMPLATE, self.labels)

    @property
    def rows(self) -> DataSettings:
        """How rows are read."""
        return DataSettings(
            text_column=self.text_column, context_column=self.query_column, keep_columns=self.keep_columns
        )


AnswerSettings: TypeAlias = LabelSettings | JudgeSettings | RerankSettings
RowSettings: TypeAlias = DataSettings | AnswerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How many actors a cluster runs, and what each has of it."""

    num_actors: int
    num_cpus: float
    num_gpus: float


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """The cluster that scores a data set; none of it changes the numbers.

    Args:
        ray_address: the cluster, as `HOST:PORT`, `auto` (one that this machine belongs to) or `local` (start
            one here); None: as Ray decides (RAY_ADDRESS, one that this machine belongs to, a new one).
        ray_actors: copies of the model; None: one a GPU, or one a machine where there is no GPU.
        ray_cpus: CPUs that each copy has, and threads it runs; None: as many as fit.
        ray_gpus: GPUs that each copy has; None: 1 where the cluster has any.
    """

    ray_address: str | None = None
    ray_actors: int | None = None
    ray_cpus: float | None = None
    ray_gpus: float | None = None

    def __post_init__(self) -> None:
        is_client = (self.ray_address or "").startswith("ray://")
        remedy = "start the command on a machine of the cluster, as `ray job submit` does"
        require(not is_client, "ray_address", f"Ray's client cannot stream a data set; {remedy}")
        for name, least in (("ray_actors", 1), ("ray_cpus", 0.01), ("ray_gpus", 0)):
            value = getattr(self, name)
            is_number = (
                isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            )
            is_fit = value is None or (is_number and value >= least)
            require(is_fit, name, f"must be a number of at least {least}, got {value!r}")

    @property
    def given(self) -> list[str]:
        """The fields that differ from their defaults."""
        return [name for name, value in vars(self).items() if value is not None]

    def share(self, machines: Sequence[Mapping[str, float]]) -> Share:
        """What each actor has of machines that Ray tells of by `CPU` and `GPU`.

        Raises:
            ParameterError: there is no room for so many.
        """
        num_gpus = self.ray_gpus
        if num_gpus is None:
            num_gpus = float(any(machine.get("GPU", 0) >= 1 for machine in machines))
        most = 1 if self.ray_actors is None and not num_gpus else math.inf  # a machine
        num_actors = self.ray_actors or _room(machines, self.ray_cpus or 1, num_gpus, most=most)
        num_cpus = self.ray_cpus
        if num_cpus is None:
            largest = int(max((machine.get("CPU", 0) for machine in machines), default=0))
            fitting = (
                n for n in range(largest, 1, -1) if _room(machines, n, num_gpus, most=most) >= num_actors
            )
            num_cpus = next(fitting, 1)
        room = _room(machines, num_cpus, num_gpus)
        room_is = f"the cluster has room for {room} of {num_cpus:g} CPUs and {num_gpus:g} GPUs"
        require(0 < num_actors <= room, "ray_actors", f"{room_is}; add machines, or ask for less")
        return Share(num_actors=num_actors, num_cpus=num_cpus, num_gpus=num_gpus)


def _room(
    machines: Sequence[Mapping[str, float]], num_cpus: float, num_gpus: float, *, most: float = math.inf
) -> int:
    """How many actors fit, at most `most` a machine."""
    return int(
        sum(
            min(
                machine.get("CPU", 0) // num_cpus,
                machine.get("GPU", 0) // num_gpus if num_gpus else math.inf,
                most,
            )
            for machine in machines
        )
    )
