"""The whole engine on the GPU decoder: scheduler, cache, prompt rows, sampling; interpreted without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton has no build for this platform")

from engine.forward.cuda.test_decoder import decoder_for
from families.tiny import VOCAB_SIZE, model_of
from families.trials import SCORED, Driven, load
from logprobe.engine.protocol import Layout
from logprobe.sampling import SamplingParams
from reply_forms import edge_of

if TYPE_CHECKING:
    from logprobe.engine.request import RequestOutput
    from logprobe.text.edge import TextEdge

GREEDY = SamplingParams(max_tokens=5, temperature=0, logprobs=3, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=5, seed=3, logprobs=3, ignore_eos=True)
TOLERANCE = 2e-5  # nats


@pytest.fixture
def text() -> TextEdge:
    """A text edge without a tokenizer: the tests only use ids."""
    return edge_of([bytes([97 + token_id % 26]) for token_id in range(VOCAB_SIZE)])


def test_results_name_a_cache_that_is_not_float32() -> None:
    layout = Layout(
        weights="checkpoint",
        num_layers=2,
        why_transformers=None,
        rope_boundary=None,
        probe_difference=0,
        verified_against="reference",
    )
    assert layout.layers == "2 by the native decoder"
    assert replace(layout, kv_dtype="bfloat16").layers == "2 by the native decoder, bfloat16 keys and values"


def outputs(forward: Any, text: TextEdge) -> list[RequestOutput]:
    rng = np.random.default_rng(0)
    long, short = rng.integers(3, 90, 21).tolist(), rng.integers(3, 90, 4).tolist()
    engine = Driven(forward, text, max_num_batched_tokens=9, max_num_seqs=4)  # prefill and decode in one step
    first = engine.run((long, SCORED), (short, GREEDY), (short, DRAWN))
    return [*first, *engine.run(([*long[:15], 7], SCORED))]  # partly cached


def test_an_engine_gives_the_numbers_of_the_cpu(text: TextEdge) -> None:
    model = model_of("llama").bfloat16().float()
    on_cpu, on_gpu = load(model, "auto"), load(model, "auto")
    on_gpu.decoder = decoder_for(model)
    on_gpu.pool = on_gpu.decoder.new_pool(on_gpu.num_slots)
    on_gpu.hidden = torch.zeros(on_gpu.hidden.shape, device=on_gpu.decoder.device)
    on_gpu._is_native = False
    on_gpu.device = on_gpu.decoder.device.type
    for got, want in zip(outputs(on_gpu, text), outputs(on_cpu, text), strict=True):
        for got_rows, want_rows in (
            (got.prompt_logprobs, want.prompt_logprobs),
            *((one.logprobs, other.logprobs) for one, other in zip(got.outputs, want.outputs, strict=True)),
        ):
            assert (got_rows is None) == (want_rows is None)
            for got_row, want_row in zip(got_rows or [], want_rows or [], strict=True):
                assert (got_row is None) == (want_row is None)
                for token_id in want_row or ():  # the first token of a prompt has no row
                    assert abs(got_row[token_id].logprob - want_row[token_id].logprob) < TOLERANCE
        assert [one.token_ids for one in got.outputs] == [one.token_ids for one in want.outputs]
