"""The GPU decoder for every family; without a GPU in Triton's interpreter on the CPU."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaAttention

pytest.importorskip("triton", reason="Triton has no build for this platform")

from families.tiny import model_of
from logprobe.config import EngineConfig
from logprobe.engine.forward.cpu.native_decoder import module_frequencies
from logprobe.engine.forward.families import FAMILIES
from logprobe.engine.forward.native import NativeForward
from logprobe.engine.forward.torch.cuda.build import cuda_decoder, parameters
from logprobe.engine.forward.torch.cuda.decoder import CudaDecoder, by_pieces
from logprobe.engine.forward.torch.cuda.plan import SpanPlan
from logprobe.engine.forward.torch.transformers_proof import TransformersProof, described
from logprobe.engine.protocol import Capture
from logprobe.errors import ParameterError, UnsupportedModelError
from logprobe.kernels.layers.forms import PanelWeights, empty_panels, fill_blocks
from logprobe.kernels.layers.layout import INT4, INT8
from logprobe.kernels.placement import as_tensor
from logprobe.kernels.triton.blocks import BlockWeight
from logprobe.models import ModelFiles
from logprobe.models.lazy import LazyModel
from logprobe.models.lora import LoraWeights, LowRank
from logprobe.models.sources import StateSource

if TYPE_CHECKING:
    from collections.abc import Sequence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 2e-5  # nats


def decoder_for(model: Any, **options: Any) -> CudaDecoder:
    """Make the decoder of a module on the CPU, without the verification that a load makes."""
    spec = described(model, TransformersProof(LazyModel.of(model)))
    assert not isinstance(spec, str), spec
    model.set_attn_implementation("eager")  # instead of the verification's
    state = {name: one.detach() for name, one in model.named_parameters()}
    tensors = parameters(StateSource(state), model, DEVICE)
    tensors |= {name: as_tensor(one).to(DEVICE) for name, one in module_frequencies(model, spec).items()}
    return CudaDecoder(spec, tensors, device=DEVICE, **options)


def rows(decoder: CudaDecoder, texts: Sequence[Any], cuts: Sequence[int]) -> torch.Tensor:
    """Return log-probabilities after each token of texts, batched and cut at some lengths; float64, nats."""
    pool = decoder.new_pool(sum(map(len, texts)))
    places = np.split(np.arange(pool.num_slots, dtype=np.int32), np.cumsum([len(ids) for ids in texts])[:-1])
    hidden: list[list[torch.Tensor]] = [[] for _ in texts]
    for start, end in zip([0, *cuts], [*cuts, max(map(len, texts))], strict=True):
        own = [index for index, ids in enumerate(texts) if len(ids) > start]
        ids = [texts[index][start:end] for index in own]
        plan = SpanPlan(
            pool,
            [places[index][: start + len(part)] for index, part in zip(own, ids, strict=True)],
            [len(part) for part in ids],
            decoder.device,
        )
        positions = np.concatenate([start + np.arange(len(part)) for part in ids])
        made = torch.split(decoder(np.concatenate(ids), positions, plan).clone(), plan.lengths)
        for index, part in zip(own, made, strict=True):
            hidden[index].append(part)
    whole = torch.cat([part for parts in hidden for part in parts])
    return decoder.head(whole).cpu().double().log_softmax(-1)


@pytest.fixture(scope="module")
def texts() -> list[Any]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 90, 9), generator.integers(0, 90, 4)]


# One for each kind of norm, rotation, attention and experts; the others are exhaustive.
SAMPLE = ("llama", "gemma3_text", "gpt2", "gpt_neox", "cohere2", "granite", "olmo2", "glm", "qwen3_moe")


def known_families() -> list[Any]:
    """Return all families; those that this version of transformers lacks are skipped."""
    lacks = pytest.mark.skipif(True, reason="this version of transformers has no such family")
    return [
        pytest.param(
            kind,
            marks=[
                *([] if kind in CONFIG_MAPPING else [lacks]),
                *([] if kind in SAMPLE else [pytest.mark.exhaustive]),
            ],
        )
        for kind in FAMILIES
    ]


@pytest.mark.parametrize("kind", known_families())
def test_every_family_gives_the_numbers_of_transformers_in_float64(kind: str, texts: list[Any]) -> None:
    model = model_of(kind)
    decoder = decoder_for(model)
    assert decoder.unplaced == []
    own = dict(model.named_parameters())
    state = decoder.state()
    assert state.keys() == own.keys()
    assert all(torch.equal(state[name], one) for name, one in own.items())
    got = rows(decoder, texts, cuts=[8])
    if FAMILIES[kind].experts is not None:
        model.set_experts_implementation("eager")  # the others do not support float64
    with torch.inference_mode():
        exact = model.double()
        want = torch.cat([exact(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1) for ids in texts])
    assert float((got - want).abs().max()) < TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "qwen2_moe", "mixtral"])
def test_a_capture_has_the_states_and_routes_of_transformers(kind: str, texts: list[Any]) -> None:
    model = model_of(kind)
    decoder = decoder_for(model)
    ids = np.asarray(texts[0])
    has_experts = FAMILIES[kind].experts is not None
    routes = np.full((len(ids), 3, 2), -1, np.int32) if has_experts else None
    capture = Capture(
        tokens=np.arange(len(ids), dtype=np.int32),
        rows=np.arange(len(ids), dtype=np.int32)[::-1].copy(),
        layers=(0, 2),
        hidden=np.zeros((len(ids), 2, decoder.hidden_size), np.float32),
        routes=routes,
    )
    pool = decoder.new_pool(len(ids))
    plan = SpanPlan(pool, [np.arange(len(ids), dtype=np.int32)], [len(ids)], decoder.device)
    last = decoder(ids, np.arange(len(ids)), plan, capture=capture)
    asked = {"output_hidden_states": True} | ({"output_router_logits": True} if has_experts else {})
    with torch.inference_mode():
        out = model(torch.from_numpy(ids)[None], use_cache=False, **asked)
    for place, layer in enumerate((0, 2)):
        want = out.hidden_states[layer][0].numpy()
        np.testing.assert_allclose(capture.hidden[::-1, place], want, atol=1e-4 * np.abs(want).max())
    before_norm = torch.from_numpy(capture.hidden[:, 1].copy()).to(decoder.device)
    assert decoder.normed(before_norm.cpu().numpy()).shape == last.shape
    if routes is not None:
        found = [logits.topk(2, dim=-1).indices.numpy() for logits in out.router_logits]
        np.testing.assert_array_equal(
            np.sort(routes[::-1], axis=-1), np.sort(np.stack(found, axis=1), axis=-1)
        )
        replay = replace(capture, routes=None, given=(routes + 1) % 4)
        again = decoder(ids, np.arange(len(ids)), plan, capture=replay)
        assert not torch.equal(again, last)
        same = decoder(ids, np.arange(len(ids)), plan, capture=replace(capture, given=routes.copy()))
        torch.testing.assert_close(same, last, atol=1e-5, rtol=0)


def test_cut_and_batched_texts_have_the_same_rows(texts: list[Any]) -> None:
    decoder = decoder_for(model_of("gemma2"))
    whole = rows(decoder, texts, cuts=[])
    alone = torch.cat([rows(decoder, [ids], cuts=[]) for ids in texts])
    in_pieces = rows(decoder, texts, cuts=(3, 4, 5))
    for other in (alone, in_pieces):
        if DEVICE == "cuda":
            assert torch.equal(other, whole)
        else:
            assert float((other - whole).abs().max()) < TOLERANCE


class QuantisedSource(StateSource):
    """The weights of a module; the matrices of its layers are int4, or int8 for `v` and `down`."""

    def __init__(self, model: Any) -> None:
        self.made: dict[str, PanelWeights] = {}
        rng = np.random.default_rng(0)
        for name, weight in model.named_parameters():
            if ".layers." in name and weight.dim() == 2:
                form = INT8 if "v_proj" in name or "down" in name else INT4
                outputs, blocks = len(weight), weight.shape[1] // 32
                header = rng.normal(scale=0.02, size=(outputs, blocks, 2 if form is INT4 else 1))
                if form is INT4:
                    groups = rng.integers(0, 1 << 32, (outputs, blocks, 4), dtype=np.uint32)
                else:
                    groups = rng.integers(-9, 9, (outputs, blocks, 32), dtype=np.int8)
                self.made[name] = panels = empty_panels(form, outputs, 32 * blocks)
                fill_blocks(panels, 0, header.astype(np.float16), groups)
                weight.data.copy_(torch.from_numpy(panels.rows(np.arange(outputs))))
        super().__init__({name: one.detach() for name, one in model.named_parameters()})

    def panels(self, name: str) -> PanelWeights | None:
        return self.made.get(name)


def test_quantised_layers_have_the_rows_of_the_same_floats(texts: list[Any]) -> None:
    model = model_of("llama", hidden_size=64, intermediate_size=96)
    source = QuantisedSource(model)
    floats = decoder_for(model)
    spec = floats.spec
    tensors = parameters(source, model, DEVICE, quantised="model.layers.")
    tensors |= {name: as_tensor(one).to(DEVICE) for name, one in module_frequencies(model, spec).items()}
    decoder = CudaDecoder(spec, tensors, device=DEVICE)
    first = decoder.layers[0]
    assert isinstance(first.output.weight, BlockWeight)
    assert isinstance(first.mlp.inner.weight, BlockWeight)  # two int4 matrices
    assert isinstance(first.projection.weight, torch.Tensor)  # int4 and int8 together
    assert torch.equal(rows(decoder, texts, cuts=[8]), rows(floats, texts, cuts=[8]))
    own, state = dict(model.named_parameters()), decoder.state()
    assert state.keys() == own.keys()
    assert all(torch.equal(state[name], one) for name, one in own.items())


@pytest.mark.parametrize(("inputs", "rank", "outputs"), [(20, 1, 7), (96, 16, 64), (96, 96, 96)])
def test_products_of_lora_weights_are_those_of_float64(inputs: int, rank: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    down, up, x = (
        torch.randn(*shape, generator=generator).to(DEVICE)
        for shape in ((inputs, rank), (rank, outputs), (5, inputs))
    )
    want = x.double() @ down.double() @ up.double()
    difference = (by_pieces(LowRank(down, up), x).double() - want).abs().max()
    assert float(difference / want.abs().max()) < 1e-6


def test_lora_weights_change_the_rows_that_name_them(texts: list[Any]) -> None:
    model = model_of("llama")
    decoder = decoder_for(model)
    generator = torch.Generator().manual_seed(1)
    layers = [name for name in decoder.state() if "layers" in name and name.endswith("_proj.weight")]
    parts = {}
    for name in layers:
        weight = model.get_parameter(name)
        parts[name.removesuffix(".weight")] = LowRank(
            0.1 * torch.randn(weight.shape[1], 3, generator=generator).numpy(),
            0.1 * torch.randn(3, weight.shape[0], generator=generator).numpy(),
        )
    lora = LoraWeights("own", "", 1, parts)
    decoder.check_lora(lora)
    without = rows(decoder, texts, cuts=[])
    lengths = [len(ids) for ids in texts]
    decoder.loras.groups = [(lora, torch.arange(lengths[0], device=DEVICE))]  # the rows of the first text
    got = rows(decoder, texts, cuts=[])
    with torch.no_grad():
        for name in layers:
            part = parts[name.removesuffix(".weight")]
            model.get_parameter(name).add_(torch.from_numpy((part.down @ part.up).T))
        want = model.double()(torch.from_numpy(texts[0])[None]).logits[0].log_softmax(-1)
    assert float((got[: lengths[0]] - want).abs().max()) < TOLERANCE
    assert float((got[lengths[0] :] - without[lengths[0] :]).abs().max()) < TOLERANCE
    assert float((got[: lengths[0]] - without[: lengths[0]]).abs().max()) > 0.01


@pytest.mark.parametrize("name", ["mlp.gate", "mlp.experts.gate_up_proj"])
def test_lora_weights_of_a_layer_that_takes_none_are_refused(name: str) -> None:
    decoder = decoder_for(model_of("qwen3_moe"))
    part = LowRank(np.zeros((4, 1), np.float32), np.zeros((1, 4), np.float32))
    lora = LoraWeights("own", "", 1, {f"{decoder.spec.path}.layers.0.{name}": part})
    with pytest.raises(UnsupportedModelError, match=name):
        decoder.check_lora(lora)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_stay_as_they_lie(dtype: torch.dtype, texts: list[Any]) -> None:
    model = model_of("qwen3").to(dtype).float()
    decoder = decoder_for(model)
    assert decoder.layers[0].projection.weight.dtype == dtype
    with torch.inference_mode():
        want = model.double()(torch.from_numpy(texts[0])[None]).logits[0].log_softmax(-1)
    assert float((rows(decoder, texts[:1], cuts=[]) - want).abs().max()) < TOLERANCE


def test_bfloat16_arithmetic_and_cache_are_less_accurate(texts: list[Any]) -> None:
    model = model_of("llama").bfloat16().float()
    exact = rows(decoder_for(model), texts, cuts=[5])
    fast = rows(decoder_for(model, arithmetic="bf16"), texts, cuts=[5])
    narrow = rows(decoder_for(model, kv_dtype=torch.bfloat16), texts, cuts=[5])
    for other in (fast, narrow):
        difference = float((other - exact).abs().max())
        assert 1e-4 < difference < 0.5


def loaded(module: Any) -> CudaDecoder | str:
    """Return the verified decoder of a module, or the reason why there is none."""
    with torch.inference_mode():
        model = LazyModel.of(module.to(DEVICE))
        return cuda_decoder(model, TransformersProof(model), device=DEVICE)


def with_a_wider_layer(model: Any) -> None:
    config = copy.deepcopy(model.config)
    config.num_key_value_heads *= 2
    attention = LlamaAttention(config, 1).requires_grad_(requires_grad=False)
    attention.config = model.config
    model.model.layers[1].self_attn = attention


def test_a_load_compares_the_decoder_with_transformers() -> None:
    decoder = loaded(model_of("llama"))
    assert isinstance(decoder, CudaDecoder)
    assert decoder.arithmetic == "bf16x3"
    assert "glm4" in loaded(model_of("glm4"))


def test_layers_of_different_sizes_are_not_supported() -> None:
    model = model_of("llama")
    with_a_wider_layer(model)
    assert "different sizes" in loaded(model)


def test_an_error_of_the_decoder_is_not_taken_for_other_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault of the kernel")

    monkeypatch.setattr("logprobe.engine.forward.torch.cuda.decoder.norm", fail)
    with pytest.raises(RuntimeError, match="a fault of the kernel"):
        loaded(model_of("llama"))


@pytest.mark.parametrize(
    "settings",
    [{"arithmetic": "bf16"}, {"kv_cache_dtype": "bfloat16"}, {"arithmetic": "bf16x3", "weights": "plain"}],
)
def test_the_cpu_refuses_what_it_cannot_compute_with(settings: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as refused:
        NativeForward(
            EngineConfig(model="tiny", device="cpu", **settings), ModelFiles("tiny", Path("/nowhere"))
        )
    assert refused.value.parameter == next(iter(settings))


@pytest.mark.parametrize("settings", [{"arithmetic": "fp8"}, {"kv_cache_dtype": "float16"}])
def test_unknown_values_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as refused:
        EngineConfig(model="tiny", **settings)
    assert [refused.value.parameter] == [*settings]
