"""The forward pass with each layout of the weights, and models that are refused at load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM

from logprobe.config import EngineConfig
from logprobe.engine.forward import native
from logprobe.engine.forward.cpu import attention
from logprobe.engine.forward.native import NativeForward
from logprobe.engine.forward.torch.transformers_attention import pooled_attention
from logprobe.engine.forward.torch.transformers_decoder import OutputHead, WatchedRun
from logprobe.engine.plan.scheduler import Span, StepPlan
from logprobe.errors import ParameterError, UnsupportedModelError
from logprobe.models import resolve
from placed import Placed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOLERANCE = 1e-4
KINDS = ["llama", "gemma2"]
LENGTHS = [1, 3, 33, 70]


class Runner:
    """Run prompts through a forward pass step by step, each prompt in its own slots."""

    def __init__(self, folder: Path, weights: str) -> None:
        config = EngineConfig(model=str(folder), weights=weights, kv_cache_memory_bytes=1 << 19)
        self.forward = NativeForward(config, resolve(str(folder)))

    def hidden(self, prompts: list[np.ndarray[Any, Any]], *, split: int = 1000) -> list[torch.Tensor]:
        """Return the hidden rows of each prompt, batched; a step runs up to `split` tokens of each."""
        ends = np.cumsum([len(ids) for ids in prompts])
        slots = [
            np.arange(end - len(ids), end, dtype=np.int32) for ids, end in zip(prompts, ends, strict=True)
        ]
        sequences: list[Any] = [Placed(ids, own) for ids, own in zip(prompts, slots, strict=True)]
        for start in range(0, max(map(len, prompts)), split):
            spans = [Span(one, start, min(start + split, len(one.token_ids))) for one in sequences]
            self.forward.run(StepPlan(tokens=[span for span in spans if span.start < span.end]).batch())
        return [torch.from_numpy(self.forward.hidden_rows(own)) for own in slots]

    @torch.inference_mode()
    def logits(self, prompts: list[np.ndarray[Any, Any]], *, split: int = 1000) -> torch.Tensor:
        """Return logits, (tokens of all prompts, vocabulary)."""
        return torch.from_numpy(self.forward.head(torch.cat(self.hidden(prompts, split=split)).numpy()))


@pytest.fixture(scope="module")
def folders(tiny_model_folder: Path, tiny_window_folder: Path) -> dict[str, Path]:
    return {"llama": tiny_model_folder, "gemma2": tiny_window_folder}


@pytest.fixture(scope="module")
def runner(folders: dict[str, Path]) -> Callable[[str, str], Runner]:
    made: dict[tuple[str, str], Runner] = {}

    def make(kind: str, weights: str) -> Runner:
        if (kind, weights) not in made:
            made[kind, weights] = Runner(folders[kind], weights)
        return made[kind, weights]

    return make


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, 280, length).astype(np.int32) for length in LENGTHS]


@pytest.mark.parametrize("split", [1000, 20, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_published_weights_give_the_numbers_of_plain_ones(
    runner: Callable[[str, str], Runner], prompts: Any, kind: str, split: int
) -> None:
    published, plain = runner(kind, "checkpoint"), runner(kind, "plain")
    torch.testing.assert_close(
        published.logits(prompts, split=split), plain.logits(prompts), rtol=0, atol=TOLERANCE
    )


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_plain_weights_give_the_numbers_of_transformers(
    runner: Callable[[str, str], Runner], folders: dict[str, Path], prompts: Any, kind: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[kind], attn_implementation="eager").eval()
    want = torch.cat([model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0] for ids in prompts])
    torch.testing.assert_close(runner(kind, "plain").logits(prompts), want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("weights", ["plain", "checkpoint"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_the_same_numbers_alone_and_in_a_batch(
    runner: Callable[[str, str], Runner], prompts: Any, kind: str, weights: str
) -> None:
    runs = runner(kind, weights)
    together = runs.hidden(prompts)
    for ids, rows in zip(prompts, together, strict=True):
        torch.testing.assert_close(runs.hidden([ids])[0], rows, rtol=0, atol=TOLERANCE)


def test_freed_scratch_is_returned_after_chunks_of_a_long_context(
    runner: Callable[[str, str], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[int] = []
    monkeypatch.setattr(native, "LONG_CONTEXT", 64)
    monkeypatch.setattr(native, "return_freed", lambda: returned.append(1))
    monkeypatch.setattr(attention, "is_short", lambda *_: False)
    runs = runner("llama", "checkpoint")
    want = runs.hidden([np.arange(100, dtype=np.int32)])
    assert len(returned) == 2
    runs.hidden([np.arange(63, dtype=np.int32)])
    assert len(returned) == 2
    got = runs.hidden([np.arange(100, dtype=np.int32)], split=40)  # contexts of 40, 80 and 100
    assert len(returned) == 6
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("weights", ["plain", "checkpoint"])
def test_the_head_squashes_logits_as_the_model_does(
    runner: Callable[[str, str], Runner], weights: str
) -> None:
    forward = runner("gemma2", weights).forward
    hidden = 5 * torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    model = forward.transformers_model()
    cap = model.config.final_logit_softcapping
    want = torch.tanh(model.lm_head(hidden) / cap) * cap
    got = torch.from_numpy(forward.head(hidden.numpy()))
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
    assert got.abs().max() > 0.9 * cap, "rows that the cap does not bend prove nothing"


@torch.inference_mode()
def test_the_head_leaves_the_model_as_it_is(folders: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["llama"]).eval()
    ids = torch.arange(9)[None]
    want = model(ids)
    decoder = model.base_model
    with WatchedRun(model) as run:
        model(ids)
    got = OutputHead(model, run.place)(decoder(ids).last_hidden_state[0])
    assert model.base_model is decoder
    torch.testing.assert_close(got, want.logits[0])
    assert torch.equal(model(ids).logits, want.logits)


def test_a_model_that_scales_its_scores_by_itself_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = pooled_attention

    def off_by_a_tenth(module: Any, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return own(module, query * 1.1, *rest, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "logprobe", off_by_a_tenth)
    with pytest.raises(UnsupportedModelError, match="logits differ from those of transformers"):
        Runner(folders["llama"], "plain")


def test_a_model_whose_head_reads_more_than_the_hidden_rows_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = LlamaForCausalLM.forward

    def scaled_by_ids(self: Any, input_ids: Any = None, **options: Any) -> Any:
        out = own(self, input_ids=input_ids, **options)
        if input_ids is not None:
            out.logits = out.logits * 1.01
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled_by_ids)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM .* logits differ from those of"):
        Runner(folders["llama"], "plain")


def test_a_model_that_gives_no_numbers_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = LlamaAttention.forward

    def spoilt(self: Any, hidden_states: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return own(self, hidden_states * torch.nan, *rest, **options)

    monkeypatch.setattr(LlamaAttention, "forward", spoilt)
    with pytest.raises(UnsupportedModelError, match="not finite"):
        Runner(folders["llama"], "plain")


def test_a_model_that_keeps_options_from_its_attention_is_followed(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = LlamaAttention.forward

    def without_options(
        self: Any, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **_: Any
    ) -> Any:
        return own(self, hidden_states, position_embeddings, attention_mask)

    monkeypatch.setattr(LlamaAttention, "forward", without_options)
    forward = Runner(folders["llama"], "plain").forward
    assert forward.layout.probe_difference < TOLERANCE


def test_a_model_with_a_layer_that_does_not_attend_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = LlamaAttention.forward

    def first_layer_only(self: Any, hidden_states: Any, *rest: Any, **options: Any) -> Any:
        if self.layer_idx > 0:
            return torch.zeros_like(hidden_states), None
        return own(self, hidden_states, *rest, **options)

    monkeypatch.setattr(LlamaAttention, "forward", first_layer_only)
    with pytest.raises(UnsupportedModelError, match=r"1 of its . layers use transformers"):
        Runner(folders["llama"], "plain")


def test_a_pool_without_room_for_two_tokens_is_an_error(folders: dict[str, Path]) -> None:
    config = EngineConfig(model=str(folders["llama"]), kv_cache_memory_bytes=100)
    with pytest.raises(ParameterError, match="one token takes") as error:
        NativeForward(config, resolve(str(folders["llama"])))
    assert error.value.parameter == "kv_cache_memory_bytes"
