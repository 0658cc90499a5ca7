"""The workflows run with least permissions, with limits, and on pinned actions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))


def steps_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_workflow_reads_only_and_is_never_run_twice_at_once(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    for name, job in workflow["jobs"].items():
        assert "uses" in job or 0 < job["timeout-minutes"] <= 120, name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_action_is_pinned_to_a_commit_and_states_its_version(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    used = re.findall(r"uses: (?!\./)(.+)", text)
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in used)
    checkouts = [
        step
        for step in steps_of(yaml.safe_load(text))
        if step.get("uses", "").startswith("actions/checkout@")
    ]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_an_action_has_one_version_in_all_workflows() -> None:
    used = {action for file in FILES for action in re.findall(r"uses: (?!\./)(\S+)", file.read_text("utf-8"))}
    names = [action.partition("@")[0] for action in used]
    assert len(names) == len(set(names))


def test_no_script_contains_an_expression() -> None:
    # The text of an event, such as the name of a branch, could break out of the script; `env` passes it.
    for file in FILES:
        for step in steps_of(yaml.safe_load(file.read_text(encoding="utf-8"))):
            assert "${{" not in step.get("run", ""), f"{file.name}: {step}"
