"""An AsyncLM on the tiny Llama, and the slow way to the same rows: a plain forward pass for each prefix."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from logprobe import AsyncLM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

SETTINGS: dict[str, Any] = {
    "kv_bytes": 1 << 21,
    "max_batch_tokens": 64,
    "max_batch_rows": 16,
    "cache_bytes": 1 << 20,
}


class PlainRows:
    """Row of a prefix by one forward pass over it alone, normalised in float64."""

    def __init__(self, folder: Path | str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()

    def __call__(self, token_ids: Sequence[int]) -> Any:

        with torch.inference_mode():
            logits = self.model(torch.tensor([list(token_ids)])).logits[0, -1]
        return torch.log_softmax(logits.double(), -1).numpy()


@pytest.fixture(scope="session")
def plain_row(tiny_model_folder: Path) -> PlainRows:
    return PlainRows(tiny_model_folder)


@pytest.fixture(scope="session")
def plain_rows_of() -> type[PlainRows]:
    return PlainRows


@pytest.fixture(scope="session")
def new_lm(tiny_model_folder: Path) -> Callable[..., AsyncLM]:
    """Make an AsyncLM on the tiny Llama; keywords are settings."""
    return lambda **settings: AsyncLM.from_name(str(tiny_model_folder), **(SETTINGS | settings))


@pytest.fixture(scope="module")
def shared_lm(new_lm: Callable[..., AsyncLM]) -> Iterator[AsyncLM]:
    with new_lm() as lm:
        yield lm


@pytest.fixture
def lm(shared_lm: AsyncLM) -> AsyncLM:
    """An AsyncLM that knows nothing yet."""
    shared_lm.clear_cache()
    shared_lm.clear_kv_cache()
    shared_lm.clear_lora()
    return shared_lm


@pytest.fixture(scope="session")
def random_ids() -> Callable[..., list[int]]:
    """Distinct prompts: `random_ids(seed, length)`."""

    def make(seed: int, length: int) -> list[int]:
        ids: list[int] = np.random.default_rng(seed).integers(2, 250, length).tolist()
        return ids

    return make


@pytest.fixture(scope="session")
def wide_model_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with 13 ids more than its tokenizer has."""
    from transformers import AutoConfig

    size = AutoConfig.from_pretrained(tiny_model_folder).vocab_size
    return resized(tiny_model_folder, tmp_path_factory.mktemp("wide"), vocab_size=size + 13)


@pytest.fixture(scope="session")
def long_model_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a context of 4,200 tokens and a vocabulary of 8,192."""
    folder = tmp_path_factory.mktemp("long")
    return resized(tiny_model_folder, folder, vocab_size=8192, max_position_embeddings=4200)


def resized(source: Path, folder: Path, **settings: int) -> Path:
    from transformers import AutoConfig, LlamaForCausalLM

    shutil.copytree(source, folder, dirs_exist_ok=True)
    torch.manual_seed(3)
    LlamaForCausalLM(AutoConfig.from_pretrained(source, **settings)).save_pretrained(folder)
    return folder
