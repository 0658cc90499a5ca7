"""Inspect tasks on hand-made data; they run in Inspect's own environment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import choice, includes, perplexity, target_perplexity
from inspect_ai.solver import generate, multiple_choice, use_tools
from inspect_ai.tool import Tool, tool

ROWS = json.loads(Path(os.environ["EVALUATION_DATA"]).read_text())


def samples(**made: Any) -> MemoryDataset:
    return MemoryDataset([Sample(**{name: make(row) for name, make in made.items()}) for row in ROWS])


@task
def choices() -> Task:
    dataset = samples(
        input=lambda row: row["question"],
        choices=lambda row: row["choices"],
        target=lambda row: "ABC"[row["answer"]],
    )
    return Task(dataset=dataset, solver=multiple_choice(), scorer=choice())


@task
def answers() -> Task:
    dataset = samples(input=lambda row: row["question"], target=lambda row: row["choices"][row["answer"]])
    return Task(dataset=dataset, solver=generate(), scorer=includes())


@task
def texts() -> Task:
    return Task(dataset=samples(input=lambda row: row["text"]), solver=generate(), scorer=perplexity())


@task
def targets() -> Task:
    dataset = samples(
        input=lambda row: f"{row['question']} {row['choices'][row['answer']]}",
        metadata=lambda row: {"target_text": f" {row['choices'][row['answer']]}"},
    )
    return Task(dataset=dataset, solver=generate(), scorer=target_perplexity())


@tool
def look() -> Tool:
    async def execute(at: Literal["sky", "cat", "sea"]) -> str:
        """Look at something.

        Args:
            at: What to look at.
        """
        return f"there is {at}"

    return execute


@task
def calls() -> Task:
    dataset = samples(input=lambda row: row["question"], target=lambda _: "there is")
    solver = [use_tools(look(), tool_choice="any"), generate(tool_calls="single")]
    return Task(dataset=dataset, solver=solver, scorer=includes())
