"""Settings of data set runs: columns, row handling, prompts, and the Ray cluster."""

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
    """Columns of a data set and scoring options; `Journal` resumes a run only with equal settings.

    Args:
        text_column: column of the text, or of the continuation if there is a context.
        context_column: column of the context before the text or the choices.
        choices_column: column of a list of texts; the most likely one is the model's answer.
        answer_column: column of the correct choice: its index from 0, its letter from A, or its text.
        keep_columns: columns copied to the output (values other than text as JSON).
        delimiter: text put before each choice, after the context.
        tokens: output each token's id, logprob, rank and entropy.
        unconditional: also score each continuation without its context, for PMI.
        detect: output metrics that indicate whether a text was in the training data or written by a machine.
        label_column: column of a text's known class: true, false, 1 or 0; adds each metric's AUC to the
            summary.
        bos: prepend BOS (EOS if there is none) to texts without context; None: as the tokenizer does.
        truncation: handling of rows longer than the context: `error` (a bad row), `left` (keep the end) or
            `window` (sliding windows).
        window: tokens per window; None: the model's context length.
        stride: tokens from one window start to the next; None: half a window. With `stride=window`, windows
            do not overlap, and the first token of each window has no logprob.
        boundary: how to score a continuation or choice if a token spans the end of the context: `auto` (by
            bytes) or `token` (as lm-evaluation-harness does).
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
        remedy = "requires a context; set context_column or choices_column, or leave boundary out"
        require(splits, "boundary", remedy)
        check_truncation(self.truncation)
        has_choices = self.choices_column is not None
        require(has_choices or self.answer_column is None, "answer_column", "requires choices_column")
        is_plain = not (has_choices and (self.tokens or self.unconditional or self.detect))
        require(is_plain, "tokens", "cannot be used with choices_column (nor can unconditional or detect)")
        require(self.detect or self.label_column is None, "label_column", "requires detect=True")
        is_cut = self.truncation == "window"
        for name in ("window", "stride"):
            require(is_cut or getattr(self, name) is None, name, "requires truncation='window'")
        require(not (is_cut and self.unconditional), "unconditional", "cannot be combined with windows")

    @property
    def columns(self) -> list[str]:
        """Columns to read, without duplicates, the text or choices column first."""
        text = [self.text_column] if self.choices_column is None else [self.choices_column]
        others = [self.context_column, self.answer_column, self.label_column]
        return list(
            dict.fromkeys([*text, *(name for name in others if name is not None), *self.keep_columns])
        )

    @property
    def rows(self) -> DataSettings:
        """These settings, which are also the settings for reading rows."""
        return self


class _Prompted:
    """Base of settings that insert each text of a data set into a prompt."""

    prompt: str
    chat: bool
    text_column: str
    keep_columns: tuple[str, ...]

    @property
    def rows(self) -> DataSettings:
        """Settings for reading rows."""
        return DataSettings(text_column=self.text_column, keep_columns=self.keep_columns)

    def asked(self, text: str) -> Asked:
        """Return the prompt for a text: a string, or a list of messages if `chat` is set."""
        filled = self.prompt.replace("{text}", text)
        return [{"role": "user", "content": filled}] if self.chat else filled

    def _check_prompt(self) -> None:
        is_place = self.prompt.count("{text}") == 1
        require(is_place, "prompt", "must contain {text} exactly once, as the placeholder of each text")


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class LabelSettings(_Prompted):
    """Labels for classifying the texts of a data set, and the prompt.

    Args:
        labels: the labels as the model writes them (with a leading space where they continue a text).
        prompt: prompt template; each text replaces {text}.
        chat: send the prompt as a user message, through the model's chat template.
        correction: correction of the label probabilities: `none`, `length` (geometric mean per token) or
            `calibrated` (ratio to the label's probability after a content-free text).
        content_free: the content-free text; None uses the text `N/A`.
        text_column: column of the text.
        keep_columns: columns copied to the output (values other than text as JSON).
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
            is_calibrated or self.content_free is None, "content_free", "requires correction='calibrated'"
        )
        self._check_prompt()

    @property
    def empty(self) -> Asked | None:
        """The prompt with the content-free text; None unless `correction` is `calibrated`."""
        if self.correction != "calibrated":
            return None
        return self.asked(CONTENT_FREE if self.content_free is None else self.content_free)


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class JudgeSettings(_Prompted):
    """Scale for grading the texts of a data set, and the prompt.

    Args:
        scale: the grades, each as the model writes it.
        prompt: prompt template; each text replaces {text}.
        chat: send the prompt as a user message, through the model's chat template.
        text_column: column of the text.
        keep_columns: columns copied to the output (values other than text as JSON).
    """

    scale: tuple[float, ...] = tuple(SCALE)
    prompt: str = "{text}"
    chat: bool = False
    text_column: str = "text"
    keep_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Convert to plain numbers, since a run is resumed only with equal settings.
        object.__setattr__(self, "scale", tuple(grades_of(self.scale).values()))
        self._check_prompt()


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class RerankSettings:
    """Query for which the documents of a data set are ranked, and the template for query and document.

    Args:
        query: the query for all documents.
        query_column: column of each document's own query, instead of `query`.
        task: instruction that says what makes a document relevant.
        template: three texts: prefix, pair and suffix. The pair contains {query} and {document}, and
            optionally {task}. Empty: Qwen3-Reranker's template.
        labels: the model's answers for a relevant and for an irrelevant document.
        text_column: column of the document.
        keep_columns: columns copied to the output (values other than text as JSON).
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
        require(is_one, "query", "set either query or query_column")
        check_layout(self.query or "", self.task, self.template or RERANK_TEMPLATE, self.labels)

    @property
    def rows(self) -> DataSettings:
        """Settings for reading rows."""
        return DataSettings(
            text_column=self.text_column, context_column=self.query_column, keep_columns=self.keep_columns
        )


AnswerSettings: TypeAlias = LabelSettings | JudgeSettings | RerankSettings
RowSettings: TypeAlias = DataSettings | AnswerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Number of Ray actors, and the numbers of CPUs and GPUs for each actor."""

    num_actors: int
    num_cpus: float
    num_gpus: float


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """Ray cluster that scores a data set; these settings do not affect the results.

    Args:
        ray_address: the cluster: `HOST:PORT`, `auto` (the one this machine belongs to) or `local` (start one
            here); None: Ray's default (RAY_ADDRESS, else the one this machine belongs to, else a new one).
        ray_actors: copies of the model; None: as many as the GPUs allow, or one per machine without GPUs.
        ray_cpus: CPUs, and threads, of each copy; None: as many as fit.
        ray_gpus: GPUs of each copy; None: 1 if the cluster has any.
    """

    ray_address: str | None = None
    ray_actors: int | None = None
    ray_cpus: float | None = None
    ray_gpus: float | None = None

    def __post_init__(self) -> None:
        is_client = (self.ray_address or "").startswith("ray://")
        remedy = "run the command on a machine of the cluster, for example with `ray job submit`"
        require(not is_client, "ray_address", f"ray:// addresses (Ray Client) are not supported; {remedy}")
        for name, least in (("ray_actors", 1), ("ray_cpus", 0.01), ("ray_gpus", 0)):
            value = getattr(self, name)
            is_number = (
                isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            )
            is_fit = value is None or (is_number and value >= least)
            require(is_fit, name, f"must be a number of at least {least}, got {value!r}")

    @property
    def given(self) -> list[str]:
        """Names of the fields that are not None."""
        return [name for name, value in vars(self).items() if value is not None]

    def share(self, machines: Sequence[Mapping[str, float]]) -> Share:
        """Return the resources of each actor, given each machine's Ray resources (`CPU` and `GPU`).

        Raises:
            ParameterError: the machines cannot hold `ray_actors` actors.
        """
        num_gpus = self.ray_gpus
        if num_gpus is None:
            num_gpus = float(any(machine.get("GPU", 0) >= 1 for machine in machines))
        most = 1 if self.ray_actors is None and not num_gpus else math.inf  # actors per machine
        num_actors = self.ray_actors or _room(machines, self.ray_cpus or 1, num_gpus, most=most)
        num_cpus = self.ray_cpus
        if num_cpus is None:
            largest = int(max((machine.get("CPU", 0) for machine in machines), default=0))
            fitting = (
                n for n in range(largest, 1, -1) if _room(machines, n, num_gpus, most=most) >= num_actors
            )
            num_cpus = next(fitting, 1)
        room = _room(machines, num_cpus, num_gpus)
        room_is = f"the cluster has room for {room} actors of {num_cpus:g} CPUs and {num_gpus:g} GPUs"
        require(
            0 < num_actors <= room,
            "ray_actors",
            f"{room_is}; add machines, or request fewer actors or less for each",
        )
        return Share(num_actors=num_actors, num_cpus=num_cpus, num_gpus=num_gpus)


def _room(
    machines: Sequence[Mapping[str, float]], num_cpus: float, num_gpus: float, *, most: float = math.inf
) -> int:
    """Return how many actors fit on the machines, with at most `most` actors per machine."""
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
