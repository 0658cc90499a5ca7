"""A second load reuses the first one's verification: the same bits, and damaged files are never used."""

from __future__ import annotations

import json
import shutil
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from decoders import EXPERTS, NATIVE, TRANSFORMERS
from families.rows import MINISTRAL3, longrope
from logprobe import LLM, SamplingParams
from logprobe.engine.forward import system_limits
from logprobe.errors import EngineClosedError, ModelError
from logprobe.models.stored.panels import INDEX, PANELS
from logprobe.models.stored.store import RECORD_FILE
from logprobe.next_token import AsyncLM

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FROM_TRANSFORMERS = 2e-4  # nats
PROMPT = list(range(5, 45))
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "Qwen2": {"tie_word_embeddings": False},  # biases
    "Qwen3": {"head_dim": 16},  # norms per head
    "Mistral": {"sliding_window": 16},
    "Phi3": longrope(6),
    "Gemma2": NATIVE["Gemma2"],
    "Gemma3Text": NATIVE["Gemma3Text"],  # two sets of rotary frequencies
    "Granite": NATIVE["Granite"],  # scaling factors
    "Ministral3": MINISTRAL3,  # scaled queries
    "Olmo": {},  # norms without weights
    "Glm": NATIVE["Glm"],  # interleaved rotation, joined gates
    "GPT2": NATIVE["GPT2"],  # learned positions
    "GPTNeoX": NATIVE["GPTNeoX"],  # projections interleaved by head
    **EXPERTS,
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for this test only."""
    monkeypatch.setenv("LOGPROBE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def llama(small_model: Callable[..., Path]) -> Path:
    return small_model("Llama", {"tie_word_embeddings": False})


def open_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"weights": "checkpoint", "kv_cache_memory_bytes": 1 << 21, **settings})


def is_recalled(llm: LLM) -> bool:
    forward: Any = llm.engine.core.engine.forward
    return forward.is_recalled  # type: ignore[no-any-return]


def scored(llm: LLM, **settings: Any) -> list[float]:
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=0, prompt_logprobs=0, **settings)
    output = llm.generate([PROMPT], params)[0]
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    return [*output.prompt_logprobs.logprobs, *output.outputs[0].logprobs.logprobs]


def load_twice(folder: Path) -> tuple[list[float], list[float]]:
    """Return the results of a first and a second load; the second must come from the cache."""
    with open_llm(folder) as llm:
        assert not is_recalled(llm)
        first = scored(llm)
    with open_llm(folder) as llm:
        assert is_recalled(llm)
        return first, scored(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recalled_model_gives_the_bits_of_the_proven_one(
    kind: str, small_model: Callable[..., Path]
) -> None:
    def with_biases(model: Any) -> None:
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight)

    folder = small_model(kind, KINDS[kind], with_biases)
    first, second = load_twice(folder)
    assert first == second
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logprobs = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    want = logprobs.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert (torch.tensor(second[: len(want)]) - want).abs().max() <= FROM_TRANSFORMERS


def test_a_model_of_the_transformers_decoder_is_proven_each_time(
    small_model: Callable[..., Path], home: Path
) -> None:
    folder = small_model("Glm4", TRANSFORMERS["Glm4"])
    for _ in range(2):
        with open_llm(folder) as llm:
            assert not is_recalled(llm)
    assert not list(home.glob(f"loads/*/{RECORD_FILE}"))
    assert list(home.glob(f"panels/*/{PANELS}"))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip_bits(file: Path) -> None:
    data = bytearray(file.read_bytes())
    for place in range(0, len(data), 7):
        data[place] ^= 0x41
    file.write_bytes(bytes(data))


def reach_beyond_the_end(file: Path) -> None:
    index = json.loads(file.read_text())
    index["tensors"] = {name: [*entry[:3], entry[3] + (1 << 30)] for name, entry in index["tensors"].items()}
    file.write_text(json.dumps(index))


def name_another_form(file: Path) -> None:
    file.write_text(file.read_text().replace("float32", "float31"))


def cut_frequencies(file: Path) -> None:
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata()
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    tensors["inv_freq.every_layer"] = tensors["inv_freq.every_layer"][:-1].contiguous()
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].contiguous()
    save_file(tensors, file, metadata)


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        (f"panels/*/{PANELS}", truncate),
        (f"panels/*/{PANELS}", flip_bits),
        (f"panels/*/{PANELS}", lambda file: file.write_bytes(b"")),
        (f"panels/*/{INDEX}", truncate),
        (f"panels/*/{INDEX}", reach_beyond_the_end),
        (f"panels/*/{INDEX}", name_another_form),
        (f"loads/*/{RECORD_FILE}", truncate),
        (f"loads/*/{RECORD_FILE}", flip_bits),
        (f"loads/*/{RECORD_FILE}", cut_frequencies),
        (f"loads/*/{RECORD_FILE}", lambda file: file.unlink()),
    ],
)
def test_what_is_damaged_is_made_again(
    pattern: str, damage: Callable[[Path], None], llama: Path, home: Path
) -> None:
    first, _ = load_twice(llama)
    [file] = home.glob(pattern)
    damage(file)
    with open_llm(llama) as llm:
        assert not is_recalled(llm)
        assert scored(llm) == first
    with open_llm(llama) as llm:
        assert is_recalled(llm)
        assert scored(llm) == first


def test_a_model_that_cannot_be_in_memory_is_refused_before_it_is_read(
    llama: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n", encoding="ascii")
    monkeypatch.setattr(system_limits, "_MEMINFO", tmp_path / "meminfo")
    with pytest.raises(ModelError, match=r"needs \d+ MB of memory"):
        open_llm(llama)
    assert not (home / "panels").exists()


def test_other_weights_of_the_same_name_are_another_model(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    first, _ = load_twice(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 0.5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with open_llm(folder) as llm:
        assert not is_recalled(llm)
        assert scored(llm) != first


def test_a_cache_that_cannot_be_written_costs_speed_alone(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("LOGPROBE_HOME", str(tmp_path / "file"))
    with open_llm(llama) as llm:
        assert not is_recalled(llm)
        assert len(scored(llm)) > 0
    assert "each load verifies and packs again" in caplog.text


def test_a_recalled_model_runs_lora_weights(
    tiny_model_folder: Path, adapter_folders: dict[str, Path]
) -> None:
    asked = {"lora": "wide"}
    said = []
    for _ in range(2):
        with open_llm(tiny_model_folder) as llm:
            llm.add_lora("wide", adapter_folders["wide"])
            said.append((is_recalled(llm), scored(llm), scored(llm, **asked)))
    assert [one[0] for one in said] == [False, True]
    assert said[0][1] == said[1][1]
    assert said[0][2] == pytest.approx(said[1][2], abs=5e-5)
    assert said[0][1] != said[0][2]


def test_the_transformers_module_of_a_recalled_model_is_loaded_when_asked_for(llama: Path) -> None:
    load_twice(llama)
    with AsyncLM.from_name(str(llama), weights="checkpoint", kv_cache_memory_bytes=1 << 21) as lm:
        module = lm.underlying_model
        assert type(module).__name__ == "LlamaForCausalLM"
        assert lm.underlying_model is module


def test_a_loaded_model_leaves_nothing(llama: Path, home: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(llama)
    with LLM(module, tokenizer=AutoTokenizer.from_pretrained(llama), kv_cache_memory_bytes=1 << 20) as llm:
        assert llm.engine.capabilities().weights == "checkpoint"
        assert not home.exists()


def test_a_copied_folder_is_recalled_and_other_weights_are_not(llama: Path, tmp_path: Path) -> None:
    with open_llm(llama) as llm:
        assert not is_recalled(llm)
    same = shutil.copytree(llama, tmp_path / "again" / llama.name)
    with open_llm(same) as llm:
        assert is_recalled(llm)
    weights = load_file(same / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5
    save_file(weights, same / "model.safetensors", {"format": "pt"})
    with open_llm(same) as llm:
        assert not is_recalled(llm)


def test_why_nothing_is_kept_is_said_once(llama: Path, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    home.write_text("no folder")
    with open_llm(llama):
        messages = [line for line in caplog.messages if "each load verifies and packs again" in line]
    assert len(messages) == 1
    assert "cannot write below" in messages[0]


@pytest.mark.parametrize("weights", ["plain", "checkpoint"])
def test_a_closed_model_lets_its_weights_and_its_pool_go(llama: Path, weights: str) -> None:
    llm = open_llm(llama, weights=weights)
    forward: Any = llm.engine.core.engine.forward
    decoder, slots = weakref.ref(forward.decoder), forward.pool.keys[0]
    assert len(scored(llm)) > 0
    assert slots.any()
    llm.close()
    assert decoder() is None
    assert not slots.any()  # its pages were returned to the system
    llm.close()
    with pytest.raises(EngineClosedError):
        scored(llm)
    assert llm.engine.stats().running == 0
    assert llm.list_loras() == {}
