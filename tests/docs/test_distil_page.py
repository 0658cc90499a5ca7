"""The loss on the distillation page equals the KL divergence over the k best and the rest, by brute force."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from doc_pages import examples_of
from logprobe import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from logprobe.records import FlatLogprobs

TEXT = "the cat and the dog in a cat on the end é 🌊 x"


@pytest.fixture(scope="module")
def loss() -> Callable[..., Any]:
    """The loss function from the page."""
    [example] = [code for code in examples_of("distil.md") if "def loss" in code]
    scope: dict[str, Any] = {}
    exec(example.split("student = AutoModel")[0], scope)  # noqa: S102 - our own page
    return scope["loss"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def whole(tiny_llm: LLM) -> NDArray[np.float64]:
    """The teacher's log-probabilities, (positions, vocabulary), nats."""
    record = rows_of(tiny_llm, -1)
    entries = record.top_entries()
    rows = np.empty((len(record), tiny_llm.engine.capabilities().vocab_size))
    np.put_along_axis(rows, entries.token_ids.reshape(rows.shape), entries.logprobs.reshape(rows.shape), 1)
    return rows


def rows_of(llm: LLM, k: int) -> FlatLogprobs:
    (output,) = llm.generate(TEXT, SamplingParams(max_tokens=0, prompt_logprobs=k))
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs[1:]


def student_of(whole: NDArray[np.float64], apart: float) -> torch.Tensor:
    """Return random distributions for the rows, further from the teacher's with larger `apart`."""
    moved = torch.from_numpy(whole) + apart * torch.randn(
        whole.shape, generator=torch.Generator().manual_seed(1)
    )
    return moved.log_softmax(-1).float()


@pytest.mark.parametrize("k", [0, 1, 3, 20, -1])
@pytest.mark.parametrize("apart", [0.0, 0.01, 1.0])
def test_the_loss_is_the_divergence_over_the_k_best_and_the_rest(
    loss: Any, tiny_llm: LLM, whole: NDArray[np.float64], k: int, apart: float
) -> None:
    record, student = rows_of(tiny_llm, k), student_of(whole, apart)
    is_chosen_outside = [
        chosen not in row[:k]
        for chosen, row in zip(
            record.chosen_entries().token_ids.tolist(), (-whole).argsort(axis=1).tolist(), strict=True
        )
    ]
    assert k in (20, -1) or any(is_chosen_outside), "else it would show nothing"
    inside, outside = loss(student, record)
    want = 0.0
    for teacher, own in zip(np.exp(whole), np.exp(student.double().numpy()), strict=True):
        best = np.argsort(-teacher, kind="stable")[: len(teacher) if k == -1 else k]
        p, q = (np.append(row[best], np.delete(row, best).sum()) for row in (teacher, own))
        want += sum(p[p > 0] * np.log(p[p > 0] / q[p > 0])) / len(whole)
    assert (inside + outside).item() == pytest.approx(want, abs=2e-6)
    assert inside.item() >= 0
    assert outside.item() >= 0
    full = (np.exp(whole) * (whole - student.double().numpy())).sum(axis=1).mean()
    assert want <= full + 1e-6
    if k == -1:
        assert want == pytest.approx(full, abs=1e-6)


@pytest.mark.parametrize("k", [1, 20])
def test_a_student_that_is_the_teacher_loses_nothing_and_moves_nowhere(
    loss: Any, tiny_llm: LLM, whole: NDArray[np.float64], k: int
) -> None:
    student = torch.from_numpy(whole).log_softmax(-1).float().requires_grad_()
    total = sum(loss(student, rows_of(tiny_llm, k)))
    total.backward()
    assert 0 <= total.item() < 1e-6
    assert student.grad.abs().max() < 1e-6


def test_a_step_along_the_gradient_makes_it_less(
    loss: Any, tiny_llm: LLM, whole: NDArray[np.float64]
) -> None:
    record, logits = rows_of(tiny_llm, 3), student_of(whole, 1.0).requires_grad_()
    before = sum(loss(logits.log_softmax(-1), record))
    before.backward()
    after = sum(loss((logits - logits.grad).log_softmax(-1), record))
    assert after < before
