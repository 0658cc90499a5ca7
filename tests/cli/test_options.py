from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import typer

from logprobe.cli.options import flags_for, open_llm, say_loading
from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_parameter_without_a_flag_of_its_own_is_named_like_one() -> None:
    with pytest.raises(typer.BadParameter, match="is wrong") as caught, flags_for(logprobs="--top"):
        raise ParameterError("max_tokens", "is wrong")
    assert caught.value.param_hint == "--max-tokens"


def test_loading_leaves_the_settings_of_transformers_as_they_were(
    tiny_model_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    with open_llm(str(tiny_model_folder)):
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr().err == f"loading {tiny_model_folder} …\n"


def test_a_known_model_is_loaded_under_its_title(capfd: pytest.CaptureFixture[str]) -> None:
    say_loading("smollm2")
    assert capfd.readouterr().err == "loading smollm2 (SmolLM2-135M-Instruct, Q4_1) …\n"
