"""An AsyncLM on the tiny Llama, and slow reference rows: a plain forward pass for each prefix."""

from __future__ import annotations

import functools
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import RemoteLLM
from logprobe.next_token import AsyncLM
from logprobe.server import ServerSettings
from logprobe.testing import StepHold, holding_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from logprobe.next_token import AsyncVirtualLM

SETTINGS: dict[str, Any] = {
    "kv_cache_memory_bytes": 1 << 21,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "cache_bytes": 1 << 20,
}
VLLM_OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 23,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "enable_lora": True,
    "max_lora_rank": 8,
}


class PlainRows:
    """Compute the row of a prefix by a separate forward pass in float64."""

    def __init__(self, folder: Path | str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="float64").eval()

    def __call__(self, token_ids: Sequence[int]) -> Any:
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([list(token_ids)])).logits[0, -1]
        return torch.log_softmax(logits, -1).numpy()


plain_rows = functools.cache(PlainRows)


@pytest.fixture
def plain_row(request: pytest.FixtureRequest, tiny_model_folder: Path) -> PlainRows:
    """Reference rows for the model behind the test's `lm`."""
    callspec = getattr(request.node, "callspec", None)
    is_on_vllm = callspec is not None and callspec.params.get("lm") == "vllm"
    return plain_rows(request.getfixturevalue("wide_heads")[0] if is_on_vllm else tiny_model_folder)


@pytest.fixture(scope="session")
def plain_rows_of() -> type[PlainRows]:
    return PlainRows


@pytest.fixture(scope="session")
def new_lm(tiny_model_folder: Path) -> Callable[..., AsyncLM]:
    """Make an AsyncLM on the tiny Llama with the given settings."""
    return lambda **settings: AsyncLM.from_name(str(tiny_model_folder), **(SETTINGS | settings))


@pytest.fixture(scope="module")
def shared_lm(new_lm: Callable[..., AsyncLM]) -> Iterator[AsyncLM]:
    with new_lm() as lm:
        yield lm


@pytest.fixture(scope="module")
def far_lm(shared_lm: AsyncLM, new_serving: Any) -> Iterator[RemoteLLM]:
    """A RemoteLLM for a server with the same engine."""
    with (
        new_serving(shared_lm._loaded, ServerSettings()) as (url, _),
        RemoteLLM(url, cache_bytes=SETTINGS["cache_bytes"]) as far,
    ):
        yield far


@pytest.fixture(scope="session")
def vllm_options() -> dict[str, Any]:
    return dict(VLLM_OPTIONS)


@pytest.fixture(scope="session")
def virtual_lm(wide_heads: tuple[Path, dict[str, Path]]) -> Iterator[AsyncVirtualLM]:
    """An AsyncVirtualLM with fewer batch rows than requests, and steps shorter than the prompts."""
    from logprobe.next_token import AsyncVirtualLM

    with AsyncVirtualLM.from_name(wide_heads[0], VLLM_OPTIONS, cache_size=256) as lm:
        yield lm


@pytest.fixture
def lm(request: pytest.FixtureRequest) -> AsyncLM | RemoteLLM | AsyncVirtualLM:
    """A language model with empty caches: "near" (in this process), "far" (on a server) or "vllm"."""
    if getattr(request, "param", "near") == "vllm":
        virtual: AsyncVirtualLM = request.getfixturevalue("virtual_lm")
        virtual.clear_cache()
        virtual.clear_kv_cache()
        virtual.clear_lora()
        return virtual
    shared_lm: AsyncLM = request.getfixturevalue("shared_lm")
    shared_lm.clear_cache()
    shared_lm.clear_kv_cache()
    shared_lm.clear_lora()
    if getattr(request, "param", "near") == "near":
        return shared_lm
    far: RemoteLLM = request.getfixturevalue("far_lm")
    far.clear_cache()
    far.clear_lora()
    return far


@pytest.fixture(scope="module")
def served(shared_lm: AsyncLM, adapter_folders: dict[str, Path], new_serving: Any) -> Iterator[Any]:
    """Serve the engine of `shared_lm` with two adapters over HTTP: (address, service)."""
    for name, folder in adapter_folders.items():
        shared_lm.add_lora(name, folder)
    with new_serving(shared_lm._loaded, ServerSettings(model_name="tiny")) as (url, app):
        yield url, app.state.service


@pytest.fixture(scope="module")
def shared_far(served: Any) -> Iterator[RemoteLLM]:
    with RemoteLLM(served[0], batch_size=16, cache_bytes=1 << 20) as far:
        yield far


@pytest.fixture
def far(shared_far: RemoteLLM, lm: AsyncLM) -> RemoteLLM:
    """A RemoteLLM with empty caches, also on its server."""
    assert isinstance(lm, AsyncLM)
    shared_far.clear_cache()
    shared_far.clear_lora()
    return shared_far


@pytest.fixture
def held(lm: AsyncLM) -> Iterator[StepHold]:
    """Hold each step of the engine until the test releases it."""
    with holding_steps(lm) as hold:
        yield hold


@pytest.fixture(scope="session")
def random_ids() -> Callable[..., list[int]]:
    """Make distinct prompts: `random_ids(seed, length)`."""

    def make(seed: int, length: int) -> list[int]:
        ids: list[int] = np.random.default_rng(seed).integers(2, 250, length).tolist()
        return ids

    return make


@pytest.fixture(scope="session")
def wide_model_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with 13 more ids than its tokenizer."""
    from transformers import AutoConfig

    size = AutoConfig.from_pretrained(tiny_model_folder).vocab_size
    return resized(tiny_model_folder, tmp_path_factory.mktemp("wide"), vocab_size=size + 13)


@pytest.fixture(scope="session")
def long_model_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    return resized(tiny_model_folder, folder, vocab_size=8192, max_position_embeddings=4200)


def resized(source: Path, folder: Path, **settings: int) -> Path:
    from transformers import AutoConfig, LlamaForCausalLM

    shutil.copytree(source, folder, dirs_exist_ok=True)
    import torch

    torch.manual_seed(3)
    LlamaForCausalLM(AutoConfig.from_pretrained(source, **settings)).save_pretrained(folder)
    return folder
