"""lighteval with our model in process and over HTTP, compared with its own model on transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from evaluators_data import surprisals

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = Path(__file__).with_name("lighteval_runs.py")
TOLERANCE = 1e-3

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def evaluate(
    run: Callable[..., str], rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], dict[str, Any]]:
    """Return the replies of a lighteval model to the documents, and their metrics."""
    data = tmp_path_factory.mktemp("data") / "rows.json"
    data.write_text(json.dumps(rows))
    home = str(tmp_path_factory.mktemp("home"))

    def ask(whose: str, arguments: str) -> dict[str, Any]:
        out = run("python", SCRIPT, data, whose, arguments, HF_HOME=home)
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found

    return ask


@pytest.fixture(scope="module")
def theirs(evaluate: Callable[..., Any], smollm2_folder: Path, tmp_path_factory: Any) -> Any:
    cache = tmp_path_factory.mktemp("cache")
    model = f"model_name={smollm2_folder},dtype=float32,batch_size=4,cache_dir={cache}"
    return evaluate("own", model)


@pytest.mark.parametrize("where", ["in process", "over HTTP"])
def test_it_scores_and_writes_as_lightevals_own_model_does(
    where: str,
    theirs: Any,
    evaluate: Callable[..., Any],
    rows: list[dict[str, Any]],
    smollm2_folder: Path,
    versions: str,
    request: pytest.FixtureRequest,
) -> None:
    sys.stdout.write(versions)
    model = f"model_name={smollm2_folder},dtype=float32"
    if where == "over HTTP":
        model = f"base_url={request.getfixturevalue('served')}"
    got = evaluate("ours", model)
    assert got["metrics"] == pytest.approx(theirs["metrics"], abs=TOLERANCE)
    assert got["exact_match"] == pytest.approx(theirs["exact_match"], abs=TOLERANCE)
    assert got["texts"] == theirs["texts"]
    assert got["greedy"] == theirs["greedy"]
    for mine, other in zip(got["logprobs"], theirs["logprobs"], strict=True):
        assert mine == pytest.approx(other, abs=TOLERANCE)
    # Not compared with lighteval's own, which reads each token's number from the position after it.
    for [mine], row in zip(got["rolling"], rows, strict=True):
        assert mine == pytest.approx(rolled(smollm2_folder, row["text"]), abs=TOLERANCE)


def rolled(folder: Path, text: str) -> float:
    """Return a text's log-probability after the chat template's empty question, by transformers; nats."""
    from transformers import AutoTokenizer

    asked = [{"role": "user", "content": ""}]
    before = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )
    return -sum(surprisals(folder, text, before=before))
