from __future__ import annotations

import gc
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated

import pytest
import typer
from typer.testing import CliRunner

from logprobe.analysis.datasets.settings import DataSettings, RaySettings
from logprobe.cli.command import Command, in_flags, naming
from logprobe.cli.dataset import ClusterFlags, ScoreFlags
from logprobe.cli.options import EngineFlags, few_collections, field_names, open_llm, say_loading, with_groups
from logprobe.config import EngineConfig
from logprobe.errors import ParameterError
from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Group:
    max_rows: Annotated[int, typer.Option("--max-num-rows", "-m", help="Rows.")] = 1
    is_fast: Annotated[bool, typer.Option("--fast/--slow", rich_help_panel="Speed")] = True
    names: Annotated[tuple[str, ...], typer.Option()] = ()
    constant: int = 3


def shown(*, group: Group) -> None:
    """Do it.

    Examples:
        shown --fast   # kept as it is
    """
    if group.max_rows < 1:
        raise ParameterError("max_rows", "must be positive, unlike max_rows=0, if is_fast='yes'")
    typer.echo(repr(group))


@pytest.fixture
def group_app() -> typer.Typer:
    own = typer.Typer(rich_markup_mode=None)
    own.command(cls=Command)(with_groups(shown))
    return own


@pytest.mark.parametrize(
    ("arguments", "group"),
    [
        ([], Group()),
        (["--max-num-rows", "2"], Group(max_rows=2)),
        (["-m", "2"], Group(max_rows=2)),
        (["--slow"], Group(is_fast=False)),
        (["--slow", "--fast"], Group()),
        (["--names", "a", "--names", "b"], Group(names=("a", "b"))),
    ],
)
def test_a_group_is_made_from_its_flags(group_app: typer.Typer, arguments: list[str], group: Group) -> None:
    assert CliRunner().invoke(group_app, arguments).stdout == f"{group!r}\n"


def test_the_help_has_panels_and_examples(group_app: typer.Typer) -> None:
    text = CliRunner().invoke(group_app, ["--help"]).stdout
    assert "Do it.\n\nExamples:\n  shown --fast   # kept as it is\n" in text
    assert text.index("Speed:\n") < text.index("Options:\n")
    assert "--max-num-rows" in text
    assert "--fast / --slow" in text


def test_an_error_names_flags(group_app: typer.Typer) -> None:
    done = CliRunner().invoke(group_app, ["--max-num-rows", "0"])
    assert done.exit_code == 2
    assert "--max-num-rows: must be positive, unlike --max-num-rows 0, if --fast yes" in " ".join(
        done.stderr.replace("│", " ").split()
    )


def test_a_plain_word_is_no_parameter() -> None:
    flags = {"device": "--device", "kv_cache_memory_bytes": "--kv-cache-memory-bytes"}
    message = "the device has no room; set kv_cache_memory_bytes or device='cpu'"
    assert in_flags(message, flags) == ("the device has no room; set --kv-cache-memory-bytes or --device cpu")
    options = {"engine_options": "--engine-options", "detect": "--detect", "lora_ids": "--lora-ids"}
    assert in_flags("set engine_options={'lora_ids': N}", options) == (
        """set --engine-options '{"lora_ids": N}'"""
    )
    assert (
        in_flags("set detect=True, as in {'lora_ids': 1}", options) == "set --detect, as in {'lora_ids': 1}"
    )


def test_a_parameter_can_be_named_by_another_flag() -> None:
    with pytest.raises(typer.BadParameter, match="is wrong") as caught, naming(prompt="--text"):
        raise ParameterError("prompt", "is wrong")
    assert caught.value.param_hint == "--text"
    with pytest.raises(ParameterError), naming(prompt="--text"):
        raise ParameterError("model", "is wrong")


def test_groups_have_the_fields_and_defaults_of_the_settings() -> None:
    config = EngineConfig().keywords() | {"speculate": "off"}  # a name for False on the command line
    assert asdict(EngineFlags()) == {name: value for name, value in config.items() if name != "model"}
    assert EngineConfig(speculate="off") == EngineConfig()
    scored = asdict(DataSettings()) | {"truncation": None}
    assert scored.items() >= asdict(ScoreFlags()).items()
    assert scored.keys() - asdict(ScoreFlags()).keys() == {"text_column", "keep_columns"}
    assert asdict(RaySettings()) == asdict(ClusterFlags())
    assert {field.name for field in fields(ServerSettings)} - {*field_names(ServerSettings).values()} == {
        "model_name"
    }


def test_flags_have_the_names_of_the_fields() -> None:
    names = field_names(EngineFlags) | field_names(ServerSettings)
    assert {flag: name for flag, name in names.items() if flag.replace("-", "_") != name} == {
        "engine-process": "process"
    }


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


def test_garbage_is_collected_as_before_after_a_start() -> None:
    before = gc.get_threshold()
    with few_collections():
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before
