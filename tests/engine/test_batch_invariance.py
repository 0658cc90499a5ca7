"""A row's bits depend only on its own text, not on chunking, caching or the rest of the batch."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from logprobe import LLM, SamplingParams
from logprobe.errors import ParameterError
from logprobe.kernels.info import cpu_arithmetics
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONTEXT = 120
ARITHMETICS = cpu_arithmetics()


@pytest.fixture(scope="module")
def bfloat16_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with weights that bfloat16 represents exactly."""
    folder = tmp_path_factory.mktemp("bfloat16")
    shutil.copytree(tiny_model_folder, folder, dirs_exist_ok=True)
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        for name, weight in weights.items():
            weights[name] = (weight.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
        save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(
    scope="module", params=[(tokens, arithmetic) for arithmetic in ARITHMETICS for tokens in (16, 33, 128)]
)
def llm(
    request: pytest.FixtureRequest, bfloat16_folder: Path, adapter_folders: dict[str, Path]
) -> Iterator[LLM]:
    num_tokens, arithmetic = request.param
    settings: dict[str, Any] = {
        "max_num_batched_tokens": num_tokens,
        "arithmetic": arithmetic,
        "kv_cache_memory_bytes": 1 << 21,
        "max_num_seqs": 16,
    }
    with LLM(str(bfloat16_folder), **settings) as opened:
        opened.add_lora("wide", adapter_folders["wide"])
        yield opened


@pytest.fixture(scope="module")
def prompts(tiny_llm: LLM) -> list[list[int]]:
    rng = np.random.default_rng(0)
    vocab_size = tiny_llm.engine.capabilities().vocab_size
    return [
        [0, *rng.integers(2, vocab_size, length).tolist()] for length in (3, 20, 64, 65, 100, CONTEXT - 20)
    ]


WANTED: dict[tuple[int, str | None, str | None], bytes] = {}


def bits(record: Any) -> bytes:
    best = record.top_entries()
    numbers = (np.asarray(part, np.float32) for part in (record.chosen_entries().logprobs, best.logprobs))
    return b"".join(part.tobytes() for part in (*numbers, np.asarray(best.token_ids, np.int64)))


@pytest.mark.parametrize("lora", [None, "wide"])
def test_a_prompts_bits_are_those_of_every_cut_alone_and_among_others(
    llm: LLM, prompts: list[list[int]], lora: str | None
) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=5, lora=lora)
    llm.engine.forget_prefixes()
    together = [bits(one.prompt_logprobs[1:]) for one in llm.generate(prompts, params)]  # type: ignore[index]
    kept = [bits(one.prompt_logprobs[1:]) for one in llm.generate(prompts, params)]  # type: ignore[index]
    alone = []
    for prompt in prompts:
        llm.engine.forget_prefixes()
        [one] = llm.generate([prompt], params)
        alone.append(bits(one.prompt_logprobs[1:]))  # type: ignore[index]
    assert together == kept == alone
    for number, found in enumerate(alone):
        case = number, lora, one.prompt_logprobs.info.arithmetic  # type: ignore[union-attr]
        assert WANTED.setdefault(case, found) == found, "another engine cuts it otherwise"


@pytest.mark.parametrize("lora", [None, "wide"])
def test_drawn_tokens_have_the_bits_that_scoring_gives_them(
    llm: LLM, prompts: list[list[int]], lora: str | None
) -> None:
    params = SamplingParams(max_tokens=18, logprobs=5, ignore_eos=True, seed=3, lora=lora)
    drawn = llm.generate(prompts, params)
    llm.engine.forget_prefixes()
    whole = [[*prompt, *one.outputs[0].token_ids] for prompt, one in zip(prompts, drawn, strict=True)]
    scored = llm.generate(whole, SamplingParams(max_tokens=0, prompt_logprobs=5, lora=lora))
    for prompt, one, again in zip(prompts, drawn, scored, strict=True):
        assert bits(one.outputs[0].logprobs) == bits(again.prompt_logprobs[len(prompt) :])  # type: ignore[index]


def test_rows_under_lora_weights_have_the_same_bits_beside_rows_without_any(
    llm: LLM, prompts: list[list[int]]
) -> None:
    asked = [
        SamplingParams(max_tokens=6, logprobs=3, ignore_eos=True, seed=4, lora=lora)
        for lora in ("wide", None) * (len(prompts) // 2)
    ]
    llm.engine.forget_prefixes()
    mixed = llm.generate(prompts, asked)
    llm.engine.forget_prefixes()
    alone = [llm.generate([prompt], params)[0] for prompt, params in zip(prompts, asked, strict=True)]
    for one, other in zip(mixed, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert bits(one.outputs[0].logprobs) == bits(other.outputs[0].logprobs)


def test_a_model_whose_bits_depend_on_the_batch_is_refused(tiny_model_folder: Path) -> None:
    pytest.importorskip("transformers")
    with raises(ParameterError, parameter="batch_invariant"):
        LLM(str(tiny_model_folder), weights="plain", batch_invariant=True, kv_cache_memory_bytes=1 << 20)


def test_every_arithmetic_has_bits_of_its_own(bfloat16_folder: Path, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=5)
    found = []
    for arithmetic in ARITHMETICS:
        settings: dict[str, Any] = {"arithmetic": arithmetic, "kv_cache_memory_bytes": 1 << 21}
        with LLM(str(bfloat16_folder), **settings) as opened:
            record: Any = opened.generate([prompts[-1]], params)[0].prompt_logprobs
        assert record.info.arithmetic == arithmetic
        found.append(np.asarray(record[1:].chosen_entries().logprobs))
    assert len({numbers.tobytes() for numbers in found}) == len(ARITHMETICS)
    for numbers in found[1:]:
        np.testing.assert_allclose(numbers, found[0], rtol=0, atol=2e-5)


@pytest.fixture(scope="module", params=ARITHMETICS)
def smollm2(request: pytest.FixtureRequest, real_llm: LLM) -> Iterator[LLM]:
    if request.param == "fma":
        yield real_llm
        return
    with LLM("smollm2", arithmetic=request.param, kv_cache_memory_bytes=1 << 26) as opened:
        yield opened


@pytest.mark.real_model
def test_real_weights_give_a_text_the_same_bits_drawn_alone_together_and_kept(smollm2: LLM) -> None:
    rng = np.random.default_rng(5)
    vocab_size = smollm2.engine.capabilities().vocab_size
    shared = rng.integers(20, vocab_size, 300).tolist()
    prompts = [
        [*shared[:length], *rng.integers(20, vocab_size, 9).tolist()] for length in (0, 4, 90, 187, 300)
    ]
    drawing = SamplingParams(max_tokens=12, logprobs=5, ignore_eos=True, seed=3)
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=5)
    smollm2.engine.forget_prefixes()
    drawn = smollm2.generate(prompts, drawing)
    texts = [[*prompt, *one.outputs[0].token_ids] for prompt, one in zip(prompts, drawn, strict=True)]
    kept = [bits(one.prompt_logprobs[1:]) for one in smollm2.generate(texts, scoring)]  # type: ignore[index]
    smollm2.engine.forget_prefixes()
    together = [bits(one.prompt_logprobs[1:]) for one in smollm2.generate(texts, scoring)]  # type: ignore[index]
    for text, prompt, one, *others in zip(texts, prompts, drawn, kept, together, strict=True):
        smollm2.engine.forget_prefixes()
        [alone] = smollm2.generate([text], scoring)
        assert alone.prompt_logprobs is not None
        assert others == [bits(alone.prompt_logprobs[1:])] * 2
        assert bits(one.outputs[0].logprobs) == bits(alone.prompt_logprobs[len(prompt) :])
