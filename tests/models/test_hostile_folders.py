"""A model folder that would take all time or memory, or break what reads it, is refused in one line."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, decoders, models

from logprobe import LLM
from logprobe.engine.backends.start import text_edge
from logprobe.errors import ModelError
from logprobe.models import ModelFiles, Vocabulary, resolve
from logprobe.models.loading import check_sizes, load_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MORE_BYTES = 2 << 30  # that a load of the tiny model may map


@pytest.fixture
def folder(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """A good one, to be spoilt."""
    return shutil.copytree(tiny_model_folder, tmp_path / "model")


@pytest.fixture
def _little_memory() -> Iterator[None]:
    """An allocation of gigabytes fails instead of taking the machine's memory."""
    if sys.platform != "linux":
        yield
        return
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MORE_BYTES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def config_of(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / "config.json", lambda config: config.update(changes))


def tokenizer_of(edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda folder: change(folder / "tokenizer.json", edit)


def text_of(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text, encoding="utf-8")

    return write


def index_of(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "other.safetensors")
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    return write


def fifo_of(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def large(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.truncate(1 << 32)  # of zeros that take nothing

    return write


BAD_PATTERN = {"type": "Split", "pattern": {"Regex": "(((?"}, "behavior": "Isolated", "invert": False}
DEEP = "[" * 200_000
REFUSED_AT_ONCE: dict[str, Callable[[Path], None]] = {
    "layers": config_of(num_hidden_layers=10**9),
    "layers beyond any model": config_of(num_hidden_layers=10**30),
    "more layers than tensors": config_of(num_hidden_layers=1000),
    "experts": config_of(num_experts=10**9),
    "nested layers": config_of(text_config={"num_hidden_layers": 10**9}),
    "settings that are no object": text_of("config.json", "[]"),
    "settings that are no JSON": text_of("config.json", "{"),
    "settings within settings": text_of("config.json", DEEP),
    "large settings": large("config.json"),
    "large tokenizer": large("tokenizer.json"),
    "large template": large("chat_template.jinja"),
    "weights are a FIFO": fifo_of("model.safetensors"),
    "tokenizer is a FIFO": fifo_of("tokenizer.json"),
    "one of several templates is a FIFO": fifo_of("additional_chat_templates/rag.jinja"),
    "generation_config is a FIFO": fifo_of("generation_config.json"),
    "index is no JSON": index_of("["),
    "index is a list": index_of("[]"),
    "index has no map": index_of('{"weight_map": [1]}'),
    "index has numbers": index_of('{"weight_map": {"a": 1}}'),
    "index leads to a file of the machine": index_of('{"weight_map": {"a": "/etc/passwd"}}'),
    "index leads elsewhere": index_of('{"weight_map": {"a": "../model.safetensors"}}'),
    "deep index": index_of(DEEP),
}
REFUSED_TOKENIZERS: dict[str, Callable[[Path], None]] = {
    "id": tokenizer_of(lambda state: state["model"]["vocab"].update(far=4_000_000_000)),
    "pattern": tokenizer_of(lambda state: state.update(pre_tokenizer=BAD_PATTERN)),
    "normaliser": tokenizer_of(
        lambda state: state.update(
            normalizer={"type": "Replace", "pattern": {"Regex": "(((?"}, "content": ""}
        )
    ),
    "deep": text_of("tokenizer.json", DEEP),
    "settings": text_of("tokenizer_config.json", DEEP),
}
REFUSED_SIZES: dict[str, Callable[[Path], None]] = {
    "vocabulary": config_of(vocab_size=10**12),
    "vocabulary that memory could hold": config_of(vocab_size=10**8),
    "width": config_of(hidden_size=10**7, head_dim=16),
    "overflow": config_of(vocab_size=10**18),
}


def refuse(act: Callable[[], Any]) -> None:
    with pytest.raises(ModelError) as caught:
        act()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize("spoil", REFUSED_AT_ONCE.values(), ids=REFUSED_AT_ONCE.keys())
def test_a_hostile_folder_is_refused_before_a_library_reads_it(
    folder: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(folder)
    refuse(lambda: resolve(str(folder)))


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize("spoil", REFUSED_TOKENIZERS.values(), ids=REFUSED_TOKENIZERS.keys())
def test_a_hostile_tokenizer_is_refused(
    folder: Path, spoil: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    spoil(folder)
    capfd.readouterr()
    refuse(lambda: text_edge(resolve(str(folder))))
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize("spoil", REFUSED_SIZES.values(), ids=REFUSED_SIZES.keys())
def test_sizes_that_the_weights_do_not_have_are_refused(folder: Path, spoil: Callable[[Path], None]) -> None:
    spoil(folder)

    def load() -> None:
        files = resolve(str(folder))
        check_sizes(files, load_config(files))

    refuse(load)


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize(
    "spoil",
    [
        config_of(vocab_size=10**12),
        text_of("generation_config.json", DEEP),
        config_of(hidden_size=128),
        config_of(num_hidden_layers=3),
    ],
    ids=["sizes", "generation settings", "shapes", "missing tensors"],
)
def test_a_load_of_a_hostile_folder_is_a_model_error(folder: Path, spoil: Callable[[Path], None]) -> None:
    spoil(folder)
    refuse(lambda: LLM(str(folder)))


def test_a_vocabulary_of_millions_is_still_read() -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": (1 << 22) - 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary.from_tokenizer(backend)
    assert vocabulary.token_bytes((1 << 22) - 1) == b"b"


def test_a_folder_with_what_no_library_reads_is_still_read(folder: Path) -> None:
    (folder / "original").mkdir()
    (folder / "notes.json").mkdir()
    os.mkfifo(folder / "pipe")
    assert resolve(str(folder)) == ModelFiles(str(folder), folder)


def test_an_index_of_its_own_shards_is_still_read(folder: Path) -> None:
    index_of('{"metadata": {"total_size": 1}, "weight_map": {"a": "other.safetensors"}}')(folder)
    assert resolve(str(folder)).folder == folder
