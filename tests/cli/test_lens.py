"""`logprobe lens`: what each layer predicts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe import LLM

TEXT = "the cat and the"


@pytest.fixture
def lens(cli: Any, tiny_model_folder: Path) -> Any:
    def run(*arguments: str) -> Any:
        return cli("lens", "--text", TEXT, *arguments, "--model", str(tiny_model_folder))

    return run


def test_a_table_has_a_line_per_token_and_one_per_layer(lens: Any, tiny_llm: LLM) -> None:
    done = lens()
    assert done.code == 0
    want = tiny_llm.logit_lens(TEXT)
    lines = done.out.splitlines()
    assert lines[0].split("  ")[0] == "#"
    assert all(f"layer {layer}" in lines[0] for layer in want.layers)
    grid, details = lines[1 : 1 + len(want.token_ids)], lines[3 + len(want.token_ids) :]
    assert len(grid) == len(want.token_ids)
    assert [int(line.split()[0]) for line in details] == [*want.layers]
    assert [int(line.split()[1]) for line in details] == want.ranks[:, -1].tolist()


def test_json_has_all_numbers(lens: Any, tiny_llm: LLM) -> None:
    found = json.loads(lens("--json", "--layers", "0,-1", "--top", "2").out)
    want = tiny_llm.logit_lens(TEXT, [0, -1], logprobs=2)
    assert found["layers"] == [0, 2]
    for position, token in enumerate(found["tokens"]):
        logprobs = [row["logprob"] for row in token["predictions"]]
        assert logprobs == pytest.approx(want.logprobs[:, position].tolist(), abs=1e-4)
    assert found["info"]["num_logprobs"] == 2


def test_the_last_layer_may_be_named(lens: Any) -> None:
    assert json.loads(lens("--json", "--layers", "last").out)["layers"] == [2]


def test_a_plot_is_saved(lens: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = lens("--plot", str(tmp_path / "lens.svg"))
    assert (done.code, done.out) == (0, "")
    assert "<svg" in (tmp_path / "lens.svg").read_text()


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["--layers", "9"], "--layers"), (["--layers", "a"], "--layers"), (["--top", "0"], "--top")],
)
def test_a_wrong_flag_is_named(lens: Any, flags: list[str], named: str) -> None:
    done = lens(*flags)
    assert done.code == 2
    assert named in done.err
