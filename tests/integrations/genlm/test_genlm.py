"""Unmodified genlm-control on this library, natively and on vLLM; run where it is installed.

`make test-genlm` runs the tests on the native engine, `make test-vllm` those on vLLM.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from doc_pages import examples_of
from refusals import raises

control = pytest.importorskip("genlm.control", reason="genlm-control is not installed (make test-genlm)")

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.integrations.genlm import GenlmLM

PROMPT = "The capital of France is"
ON_VLLM: dict[str, Any] = {"enforce_eager": True, "max_model_len": 128, "kv_cache_memory_bytes": 1 << 28}
ENGINES = ["native", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="module", params=ENGINES)
def lm(request: pytest.FixtureRequest) -> Iterator[GenlmLM]:
    from logprobe.errors import ModelError
    from logprobe.integrations.genlm import LogprobeLM, LogprobeVirtualLM

    try:
        model = (
            LogprobeLM.from_name("smollm2", kv_cache_memory_bytes=1 << 28)
            if request.param == "native"
            else LogprobeVirtualLM.from_name("smollm2", ON_VLLM, cache_size=100)
        )
    except ModelError as error:
        pytest.skip(f"smollm2 cannot be had: {error}")
    yield model
    model.cleanup()


@pytest.fixture(scope="module")
def prompted(lm: GenlmLM) -> Any:
    potential = control.PromptedLLM(lm)
    potential.set_prompt_from_str(PROMPT)
    return potential


def plain_rows(folder: Path, prefixes: list[list[int]]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.inference_mode():
        logits = [model(torch.tensor([ids])).logits[0, -1] for ids in prefixes]
    return torch.log_softmax(torch.stack(logits), -1)


def test_next_token_weights_and_scores_are_those_of_a_plain_forward_pass(
    lm: GenlmLM, prompted: Any, smollm2_folder: Path
) -> None:
    ids = lm.tokenizer.encode(PROMPT)
    after = lm.tokenizer.encode(" Paris, of course")
    prefixes = [ids + after[:end] for end in range(len(after))]
    want = plain_rows(smollm2_folder, prefixes)
    context = [lm.byte_vocab[i] for i in after]
    score = asyncio.run(prompted.log_probability(context))
    assert score == pytest.approx(sum(float(row[i]) for row, i in zip(want, after, strict=True)), abs=2e-3)
    weights = asyncio.run(prompted.logw_next([])).weights
    tokens = prompted.token_maps.potential_vocab
    got = [weights[place] for place in range(0, len(tokens), 997)]
    named = [float(want[0][token.token_id]) for token in tokens[::997]]
    np.testing.assert_allclose(got, named, atol=2e-3)


def test_batches_are_consistent_with_single_asks(lm: GenlmLM) -> None:
    prefixes = [lm.tokenizer.encode(text) for text in ("a", "a b", "a b c", PROMPT)]
    together = asyncio.run(lm.batch_next_token_logprobs(prefixes))
    lm.clear_cache()
    for ids, row in zip(prefixes, together, strict=True):
        np.testing.assert_allclose(lm.next_token_logprobs_sync(ids), row, atol=1e-4)
        row[:] = 0  # the caller may change its tensor
        assert float(lm.next_token_logprobs_sync(ids).exp().sum()) == pytest.approx(1, abs=1e-5)


def test_length_constrained_sampling_gives_texts_of_that_length(prompted: Any) -> None:
    class AtMost(control.Potential):  # type: ignore[misc,name-defined]
        def __init__(self, vocabulary: list[Any], most: int) -> None:
            super().__init__(vocabulary)
            self.most = most

        async def complete(self, context: list[Any]) -> float:
            return 0.0 if len(context) == self.most else float("-inf")

        async def prefix(self, context: list[Any]) -> float:
            return 0.0 if len(context) <= self.most else float("-inf")

    # After most texts the end is so unlikely that a weight may round to zero, hence many samples.
    np.random.seed(0)  # noqa: NPY002 - genlm-control draws from numpy's global state
    sampler = control.AWRS(prompted, AtMost(prompted.vocab, 5))
    sequences = asyncio.run(sampler.smc(n_particles=16, ess_threshold=0.5, max_tokens=8))
    texts = sequences.decoded_posterior
    contexts = [context for context, weight in sequences if weight > float("-inf")]
    assert contexts
    assert all(len(context) == 6 for context in contexts), texts  # five tokens and the end


def test_regex_constrained_sampling_gives_texts_that_match(prompted: Any) -> None:
    import re

    fsa = control.BoolFSA.from_regex(r" (Paris|Lyon|Rome)[.,]").coerce(prompted, f=b"".join)
    sampler = control.AWRS(prompted, fsa)
    sequences = asyncio.run(sampler.smc(n_particles=6, ess_threshold=0.5, max_tokens=8))
    posterior = sequences.decoded_posterior
    assert posterior
    assert all(re.fullmatch(r" (Paris|Lyon|Rome)[.,]", text) for text in posterior), posterior
    assert max(posterior, key=posterior.get).startswith(" Paris")


def test_a_model_by_name_is_ours_while_served() -> None:
    from genlm.backend.llm import AsyncTransformer

    from logprobe.errors import ModelError, ParameterError
    from logprobe.integrations.genlm import LogprobeLM, serve_by_name

    with serve_by_name():
        try:
            potential = control.PromptedLLM.from_name(
                "smollm2", backend="hf", hf_opts={"torch_dtype": "float32", "device_map": "cpu"}
            )
        except ModelError as error:
            pytest.skip(f"smollm2 cannot be had: {error}")
        assert type(potential.model) is LogprobeLM
        potential.model.cleanup()
        with raises(ParameterError, parameter="quantization"):
            LogprobeLM.from_name("smollm2", hf_opts={"quantization": 4})
    import genlm.backend.llm

    assert genlm.backend.llm.AsyncTransformer is AsyncTransformer


@pytest.mark.vllm
def test_a_model_by_name_in_vllm_gives_the_native_rows(
    wide_heads: tuple[Path, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from genlm.backend.llm import AsyncVirtualLM

    from logprobe.integrations.genlm import LogprobeLM, LogprobeVirtualLM, serve_by_name

    folder, adapters = wide_heads
    asked = [[5, 6, 7], [5, 6], [9]]
    name, weights = next(iter(adapters.items()))
    native = LogprobeLM.from_name(str(folder), kv_cache_memory_bytes=1 << 20)
    options = {**ON_VLLM, "enable_lora": True, "max_lora_rank": 8}
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # genlm-backend sets this when imported
    with serve_by_name():
        potential = control.PromptedLLM.from_name(str(folder), backend="vllm", engine_opts=options)
    assert type(potential.model) is LogprobeVirtualLM
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1", "its own class finds what it has set"
    try:
        for lm in (native, potential.model):
            lm.add_new_lora(weights, name)
        for lora in (None, name):
            got, want = (
                asyncio.run(lm.batch_next_token_logprobs(asked, lora_name=lora))
                for lm in (potential.model, native)
            )
            np.testing.assert_allclose(got, want, atol=1e-3)
    finally:
        potential.model.cleanup()
        native.cleanup()
    import genlm.backend.llm

    assert genlm.backend.llm.AsyncVirtualLM is AsyncVirtualLM


def test_ids_of_the_model_alone_are_no_tokens(tiny_model_folder: Path, tmp_path: Path) -> None:
    import shutil

    from transformers import AutoConfig, LlamaForCausalLM

    from logprobe.integrations.genlm import LogprobeLM

    shutil.copytree(tiny_model_folder, tmp_path, dirs_exist_ok=True)
    size = AutoConfig.from_pretrained(tiny_model_folder).vocab_size
    config = AutoConfig.from_pretrained(tiny_model_folder, vocab_size=size + 13)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    wide = LogprobeLM.from_name(str(tmp_path), kv_cache_memory_bytes=1 << 20)
    try:
        assert len(wide.byte_vocab) == len(wide.str_vocab) == len(wide.tokenizer) == size
        assert all(wide.byte_vocab)
        row = wide.next_token_logprobs_sync([5])
        assert row.shape == (size + 13,)
        weights = asyncio.run(control.PromptedLLM(wide, prompt_ids=[5]).logw_next([])).weights
        assert len(weights) == size
        assert np.logaddexp.reduce(np.asarray(weights)) == pytest.approx(0, abs=1e-4)
    finally:
        wide.cleanup()


def test_what_cannot_be_done_is_an_error(lm: GenlmLM) -> None:
    from logprobe.errors import ParameterError
    from logprobe.integrations.genlm import LogprobeLM, LogprobeVirtualLM

    with pytest.raises(ValueError, match="outside the vocabulary"):
        asyncio.run(lm.next_token_logprobs([10**6]))
    with pytest.raises(ValueError, match="no LoRA weights 'absent'"):
        asyncio.run(lm.batch_next_token_logprobs([[5]], lora_name="absent"))
    with pytest.raises(RuntimeError, match="lora_name"):  # the error class of genlm-backend
        lm.set_lora("here", "absent")
    with raises(ParameterError, parameter="bitsandbytes_opts"):
        LogprobeLM.from_name("smollm2", bitsandbytes_opts={"load_in_4bit": True})
    if type(lm) is LogprobeVirtualLM:
        with raises(ParameterError, parameter="hf_opts"):
            LogprobeVirtualLM.from_name("smollm2", hf_opts={})
        with raises(ParameterError, parameter="no_such_option"):
            LogprobeVirtualLM.from_name("smollm2", {"no_such_option": 1})


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("LogprobeLM", ("potential", "by_name")),
        pytest.param("LogprobeVirtualLM", ("in_vllm",), marks=pytest.mark.vllm),
    ],
)
def test_the_example_of_the_page_runs(kind: str, left: tuple[str, ...], wide_heads: Any) -> None:
    (example,) = [one for one in examples_of("next-token.md") if f"import {kind}" in one]
    names: dict[str, Any] = {}
    code = compile(example.replace('"smollm2"', repr(str(wide_heads[0]))), "next-token.md", "exec")
    exec(code, names)  # noqa: S102 - our own page
    for name in left:
        assert type(names[name].model).__name__ == kind
        names[name].model.cleanup()


def test_genlm_backends_own_lines_of_the_page_run(
    tiny_model_folder: Path, adapter_folders: dict[str, Path]
) -> None:
    import re
    from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
    from inspect import isawaitable

    from genlm.backend.llm import AsyncTransformer

    page = Path(__file__).parents[3] / "docs" / "coming-from.md"
    section = page.read_text(encoding="utf-8").split("## genlm-backend\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(lines) >= 4
    # Loading adapters and the event loop are transformers' part; all lines share one loop.
    names = {"AsyncTransformer": AsyncTransformer, "lora": str(adapter_folders["narrow"])}

    async def run() -> None:
        for line in lines:
            code = line.replace('"smollm2"', repr(str(tiny_model_folder)))
            ended = eval(compile(code, str(page), "exec", flags=PyCF_ALLOW_TOP_LEVEL_AWAIT), names)  # noqa: S307
            if isawaitable(ended):
                await ended

    asyncio.run(run())
