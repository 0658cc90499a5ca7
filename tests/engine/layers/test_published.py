"""Layers on published weights beside the plain ones: products, joins, tied weights, whole small models."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP
from transformers.pytorch_utils import Conv1D

from logprobe import LLM, SamplingParams
from logprobe.config import EngineConfig
from logprobe.engine.forward.native import NativeForward
from logprobe.engine.layers.packed import PackedNorm, added, choose_layout, join
from logprobe.engine.layers.published import (
    PublishedEmbedding,
    PublishedGatedMLP,
    PublishedJoinedMLP,
    PublishedLinear,
    named_panels,
    publish_,
)
from logprobe.errors import ParameterError
from logprobe.kernels.layers import widen
from logprobe.kernels.layers.forms import pack_floats
from logprobe.models import resolve

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FORMS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = 2e-6  # of the largest number
FROM_TRANSFORMERS = 2e-4  # nats


def linear(inputs: int, outputs: int, *, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(requires_grad=False)


def rows(count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(7,), (1, 5), (2, 3), (40,)])
def test_a_linear_layer_gives_its_product(shape: tuple[int, ...]) -> None:
    plain = linear(80, 96)
    published = PublishedLinear([pack_floats(plain.weight, plain.bias)])
    x = rows(int(torch.Size(shape).numel()), 80).view(*shape, 80)
    assert_close(published(x), plain(x))
    residual = torch.ones(*shape, 96)
    assert_close(added(published, x, residual).view(*shape, 96), plain(x) + residual)


@torch.inference_mode()
def test_gpt2s_linear_layer_is_published_by_its_own_way_round() -> None:
    layer = Conv1D(7, 5)
    nn.init.normal_(layer.bias)
    model = nn.ModuleDict({"c_attn": layer})
    (names, panels), *_ = named_panels(model)
    assert names == ("c_attn",)
    x = torch.randn(3, 2, 5)
    want = layer(x)
    for kept in ({}, {"c_attn": panels}):
        published = copy.deepcopy(model)
        publish_(published, kept)
        assert type(published["c_attn"]) is PublishedLinear
        assert_close(published["c_attn"](x), want)


def test_parts_of_several_forms_make_one_layer() -> None:
    parts = [linear(64, 48, seed=seed) for seed in range(3)]
    parts[1].weight.copy_(parts[1].weight.bfloat16())
    whole = join(parts)
    published = PublishedLinear([pack_floats(part.weight, part.bias) for part in parts])
    assert len(published.parts) == 3
    x = rows(9, 64)
    assert_close(published(x), whole(x))
    assert_close(published.added(x, torch.ones(9, 144)), whole(x) + 1)


def loaded(folder: str) -> NativeForward:
    config = EngineConfig(model=folder, weights="published", kv_bytes=1 << 21)
    return NativeForward(config, resolve(folder))


class GatedMLP(nn.Module):
    """As transformers' decoders have it."""

    def __init__(self, activation: str, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = linear(48, 112, bias=bias, seed=1)
        self.up_proj = linear(48, 112, bias=bias, seed=2)
        self.down_proj = linear(112, 48, bias=bias, seed=3)
        self.act_fn = ACT2FN[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., 48) → (..., 48)."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu"])
def test_a_gated_mlp_is_two_products(activation: str, *, bias: bool) -> None:
    plain = nn.Sequential(GatedMLP(activation, bias=bias))
    published = copy.deepcopy(plain)
    publish_(published, {})
    assert type(published[0]) is PublishedGatedMLP
    x = rows(11, 48)
    assert_close(published(x), plain(x))
    assert_close(added(published[0], x, x), plain(x) + x)


@torch.inference_mode()
@pytest.mark.parametrize("size", [96, 80], ids=["whole panels", "a panel is cut"])
def test_gates_and_values_of_one_layer_are_read_in_one_pass(size: int) -> None:
    torch.manual_seed(4)
    plain = nn.Sequential(Phi3MLP(Phi3Config(hidden_size=48, intermediate_size=size, pad_token_id=0))).eval()
    kept = {name: panels for names, panels in named_panels(plain) for name in names}
    assert "0.gate_up_proj.values" in kept
    x = rows(11, 48)
    for given in ({}, kept):
        published = copy.deepcopy(plain)
        publish_(published, given)
        mlp: Any = published[0]
        assert type(mlp) is PublishedJoinedMLP
        assert_close(published(x), plain(x))
        assert_close(added(mlp, x, x), plain(x) + x)
        own = mlp.gate_up_proj
        mlp.gate_up_proj = nn.Sequential(own, nn.ReLU())  # as LoRA weights wrap it
        gate, values = own(x).relu().chunk(2, dim=1)
        assert_close(mlp(x), mlp.down_proj(nn.functional.silu(gate) * values))


@torch.inference_mode()
def test_a_tied_head_shares_the_embeddings_panels() -> None:
    model: Any = nn.Module()
    model.embed_tokens, model.lm_head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
    model.lm_head.weight = model.embed_tokens.weight
    weight = model.embed_tokens.weight.detach().clone()
    publish_(model, {})
    assert type(model.embed_tokens) is PublishedEmbedding
    assert model.embed_tokens.weights is model.lm_head.parts[0]
    ids = torch.tensor([[3, 99, 3, 0]])
    with torch.inference_mode():
        assert torch.equal(model.embed_tokens(ids), weight[ids])
        assert_close(model.lm_head(rows(2, 64)), rows(2, 64) @ weight.T)


class ScaledEmbedding(nn.Embedding):
    """As Gemma 3 has it."""

    embed_scale = torch.tensor(7.0)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(token_ids) * self.embed_scale


class ShiftedEmbedding(nn.Embedding):
    """Of a form that nobody here knows."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(token_ids) + 1


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "is_known"), [(ScaledEmbedding, True), (ShiftedEmbedding, False)])
def test_an_embedding_is_taken_where_its_numbers_are_known(
    kind: type[nn.Embedding], *, is_known: bool
) -> None:
    model: Any = nn.Module()
    model.embed_tokens, model.lm_head = kind(100, 64), nn.Linear(64, 100, bias=False)
    model.lm_head.weight = model.embed_tokens.weight
    ids = torch.tensor([[3, 99, 3, 0]])
    want, weight = model.embed_tokens(ids), model.lm_head.weight.clone()
    publish_(model, {"embed_tokens": pack_floats(weight)})
    assert (type(model.embed_tokens) is PublishedEmbedding) == is_known
    assert torch.equal(model.embed_tokens(ids), want)
    assert_close(model.lm_head(rows(2, 64)), rows(2, 64) @ weight.T)


def test_panels_that_the_file_had_are_taken_by_name() -> None:
    model: Any = nn.Module()
    model.attn = nn.Module()
    model.attn.qkv_proj, model.o_proj = linear(32, 96, bias=False), linear(32, 32)
    kept = {
        f"attn.{name}": pack_floats(torch.full((32, 32), float(place)))
        for place, name in enumerate(("q_proj", "k_proj", "v_proj"))
    }
    kept["o_proj"] = pack_floats(torch.eye(32))
    bias = model.o_proj.bias.clone()
    publish_(model, kept)
    assert model.attn.qkv_proj(torch.ones(1, 32))[0, ::32].tolist() == [0.0, 32.0, 64.0]
    assert torch.equal(model.o_proj(torch.ones(1, 32))[0], 1 + bias)


@pytest.fixture(scope="module")
def saved(small_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A small random model whose weights are numbers of the form."""

    def save(kind: str, form: str) -> Path:
        path = small_model(kind, {})
        folder = tmp_path_factory.mktemp(f"{kind}-{form}")
        for file in path.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        AutoModelForCausalLM.from_pretrained(path, dtype=FORMS[form]).save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma", "Olmo2"])
def test_models_keep_their_numbers_in_every_form(saved: Callable[..., Path], kind: str, form: str) -> None:
    folder = saved(kind, form)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.randint(2, 280, (1, 40), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        logprobs = model.eval()(ids).logits[0].log_softmax(-1)
    want = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
    with LLM(str(folder), weights="published", kv_bytes=1 << 21) as llm:
        forward = llm.engine.core.engine.forward
        forms = {
            part.form.name
            for module in forward.model.modules()
            if isinstance(module, PublishedLinear)
            for part in module.parts
        }
        assert forms == {form}
        output = llm.generate([ids[0].tolist()], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
        got = torch.tensor(list(output.prompt_logprobs.logprobs))
    assert (got - want).abs().max() <= FROM_TRANSFORMERS


def test_rows_have_the_same_bits_whatever_their_number(saved: Callable[..., Path]) -> None:
    folder = str(saved("Llama", "bfloat16"))
    forward = NativeForward(
        EngineConfig(model=folder, weights="published", kv_bytes=1 << 21), resolve(folder)
    )
    layer: Any = forward.model.base_model.layers[0]
    x = rows(70, layer.self_attn.qkv_proj.in_features)
    with torch.inference_mode():
        for module in (layer.self_attn.qkv_proj, layer.mlp):
            whole = module(x)
            for count in (1, 2, 7, 9, 40):
                assert torch.equal(module(x[:count]), whole[:count])


def test_adapted_halves_of_an_mlp_meet_after_the_lora_has_added_to_them() -> None:
    model = nn.Sequential(GatedMLP("silu", bias=False))
    publish_(model, {})
    mlp: Any = model[0]
    x = rows(3, 48)
    with torch.inference_mode():
        gates = mlp.gate_proj(x)
        want = mlp.down_proj(nn.functional.silu(gates + 1) * mlp.up_proj(x))
        plain = mlp.gate_proj

        class Raised(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                raised: torch.Tensor = plain(x) + 1
                return raised

        mlp.gate_proj = Raised()
        assert_close(mlp(x), want)


def test_norms_are_parameters_so_that_a_model_knows_its_device(saved: Callable[..., Path]) -> None:
    folder = str(saved("Llama", "float32"))
    forward = NativeForward(
        EngineConfig(model=folder, weights="published", kv_bytes=1 << 21), resolve(folder)
    )
    assert any(isinstance(module, PackedNorm) for module in forward.model.modules())
    assert forward.model.device == torch.device("cpu")


def test_a_processor_without_the_instructions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widen, "machine", lambda: "x86_64")
    monkeypatch.setattr(widen, "cpu_features", frozenset)
    with pytest.raises(ParameterError, match="published") as error:
        choose_layout(nn.Sequential(linear(8, 8)), "published")
    assert error.value.parameter == "weights"
    assert choose_layout(nn.Sequential(linear(8, 8)), "plain") == "plain"
