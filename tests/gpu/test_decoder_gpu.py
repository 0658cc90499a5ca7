"""The engine on an NVIDIA GPU: the numbers of the CPU, and bits that do not depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from conftest import save_tokenizer
from families.rows import RIGHT
from families.tiny import model_of
from logprobe import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TOLERANCE = 5e-5  # nats: the rounding of two engines on tiny random models
TOP = 5
NUM_NEW = 24
LENGTHS = (44, 9, 21, 64, 3, 33, 50, 17)
LLAMA = "Llama"
# Row of `families.rows` → dtype of the checkpoint.
MODELS = [
    (LLAMA, "bfloat16"),
    (LLAMA, "float32"),
    ("Qwen3", "bfloat16"),  # norms per head
    ("Gemma 2", "bfloat16"),  # sliding windows, soft caps, four norms, a tied head
    ("Phi-3 with a window", "bfloat16"),  # joined projections
    ("GPT-2", "float32"),  # LayerNorm with biases, learned positions, transposed weights, no gates
]
SETTINGS: dict[str, Any] = {
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 24,
}
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=TOP)
DRAWN = SamplingParams(max_tokens=NUM_NEW, temperature=0, logprobs=TOP, ignore_eos=True)


@dataclass(frozen=True)
class Pair:
    """The engine on the GPU and on the CPU for one model, with prompts for both."""

    gpu: LLM
    cpu: LLM
    prompts: list[list[int]]

    def run(self, prompts: list[list[int]], params: SamplingParams, llm: LLM | None = None) -> list[Any]:
        """Run prompts with empty caches and return their outputs."""
        llm = llm or self.gpu
        llm.engine.forget_prefixes()
        return llm.generate(prompts, params)


def save(folder: Path, name: str, dtype: str) -> int:
    (row,) = [row for row in RIGHT if row.name == name]
    vocab_size = save_tokenizer(folder, with_bos=False)
    model = model_of(row.kind, vocab_size=vocab_size, **row.special)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return vocab_size


def texts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocab_size, length).tolist() for length in LENGTHS]


@pytest.fixture(
    scope="module",
    params=[pytest.param(model, marks=pytest.mark.xdist_group("-".join(model))) for model in MODELS],
    ids=lambda model: f"{model[0]} in {model[1]}",
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("gpu")
    vocab_size = save(folder, *request.param)
    with (
        LLM(str(folder), device=DEVICE, **SETTINGS) as gpu,
        LLM(str(folder), device="cpu", **SETTINGS) as cpu,
    ):
        yield Pair(gpu, cpu, texts(vocab_size))


def numbers(record: Any, start: int = 0) -> np.ndarray[Any, Any]:
    """Return log-probabilities of the chosen and the likeliest tokens at each position, float32."""
    rows = record[start:]
    best = np.asarray(rows.top_entries().logprobs, np.float32).reshape(len(rows), TOP)
    return np.column_stack([np.asarray(rows.chosen_entries().logprobs, np.float32), best])


def bits(record: Any, start: int = 0) -> bytes:
    ids = np.asarray(record[start:].top_entries().token_ids, np.int64)
    return numbers(record, start).tobytes() + ids.tobytes()


def test_the_layers_run_by_the_decoder_for_gpus(pair: Pair) -> None:
    [one] = pair.run(pair.prompts[:1], SCORED)
    assert one.prompt_logprobs.info.arithmetic == "bf16x3"


def test_prompts_have_the_numbers_of_the_cpu(pair: Pair) -> None:
    found, wanted = (pair.run(pair.prompts, SCORED, llm) for llm in (pair.gpu, pair.cpu))
    for one, other in zip(found, wanted, strict=True):
        ours, theirs = numbers(one.prompt_logprobs, 1), numbers(other.prompt_logprobs, 1)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


def test_drawn_tokens_have_the_numbers_of_the_cpu(pair: Pair) -> None:
    drawn = pair.run(pair.prompts, DRAWN)
    # Scored on the CPU instead of sampled: rounding may swap nearly equal tokens.
    whole = [[*ids, *one.outputs[0].token_ids] for ids, one in zip(pair.prompts, drawn, strict=True)]
    scored = pair.run(whole, SCORED, pair.cpu)
    for ids, one, again in zip(pair.prompts, drawn, scored, strict=True):
        ours, theirs = numbers(one.outputs[0].logprobs), numbers(again.prompt_logprobs, len(ids))
        assert len(ours) == NUM_NEW
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


def test_bits_are_the_same_alone_and_in_a_batch_of_8(pair: Pair) -> None:
    together = pair.run(pair.prompts, SCORED)
    drawn = pair.run(pair.prompts, DRAWN)
    for ids, scored, one in zip(pair.prompts, together, drawn, strict=True):
        [alone] = pair.run([ids], SCORED)
        assert bits(alone.prompt_logprobs, 1) == bits(scored.prompt_logprobs, 1)
        [alone] = pair.run([ids], DRAWN)
        assert alone.outputs[0].token_ids == one.outputs[0].token_ids
        assert bits(alone.outputs[0].logprobs) == bits(one.outputs[0].logprobs)


def test_drawn_tokens_that_are_scored_have_the_same_bits(pair: Pair) -> None:
    drawn = pair.run(pair.prompts, DRAWN)
    whole = [[*ids, *one.outputs[0].token_ids] for ids, one in zip(pair.prompts, drawn, strict=True)]
    scored = pair.run(whole, SCORED)
    for ids, one, again in zip(pair.prompts, drawn, scored, strict=True):
        assert bits(one.outputs[0].logprobs) == bits(again.prompt_logprobs, len(ids))


def test_a_stream_has_the_bits_of_the_whole(pair: Pair) -> None:
    [whole] = pair.run(pair.prompts[:1], DRAWN)
    pair.gpu.engine.forget_prefixes()
    pieces = list(pair.gpu.stream(pair.prompts[0], DRAWN))
    assert len(pieces) > 1
    assert bits(pieces[-1].outputs[0].logprobs) == bits(whole.outputs[0].logprobs)


@pytest.mark.parametrize(
    "special", [{"async_scheduling": True}, {"max_num_batched_tokens": 7, "max_num_seqs": 3}], ids=str
)
def test_settings_of_steps_change_no_bit(special: dict[str, Any], tmp_path: Path) -> None:
    prompts = texts(save(tmp_path, LLAMA, "bfloat16"))
    found = []
    for settings in (SETTINGS, SETTINGS | special):
        with LLM(str(tmp_path), device=DEVICE, **settings) as llm:
            scored, drawn = llm.generate(prompts, SCORED), llm.generate(prompts, DRAWN)
        found.append(
            [bits(one.prompt_logprobs, 1) for one in scored]
            + [bits(one.outputs[0].logprobs) for one in drawn]
        )
    assert found[0] == found[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_at_once_give_the_same_bits(tmp_path: Path) -> None:
    prompts = texts(save(tmp_path, LLAMA, "bfloat16"))
    with (
        LLM(str(tmp_path), device="cuda:0", **SETTINGS) as first,
        LLM(str(tmp_path), device="cuda:1", **SETTINGS) as second,
    ):
        found = [llm.generate(prompts, DRAWN) for llm in (first, second)]
        assert second.engine.capabilities().device == "cuda:1"
    bits_of = [[bits(one.outputs[0].logprobs) for one in outputs] for outputs in found]
    assert bits_of[0] == bits_of[1]
