from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from logprobe.errors import UnsupportedModelError
from logprobe.kernels import threads
from logprobe.models import ModelFiles, load_config, load_model, load_tokenizer, resolve
from logprobe.models.loading import load_lazily, load_state
from logprobe.models.quiet import quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


LOADS: list[Callable[[ModelFiles], object]] = [
    lambda files: load_lazily(files, {}),
    lambda files: load_state(files, {}, dtype=torch.float32),
]


@pytest.fixture
def files(tmp_path: Path, home: Path, write_gguf: Callable[..., Path]) -> ModelFiles:
    assert not home.exists()
    return resolve(str(write_gguf(tmp_path / "tiny.gguf")))


def test_a_model_is_ready_for_inference_only(files: ModelFiles) -> None:
    before = threads.num_threads()
    model = load_model(files, dtype=torch.bfloat16, attn_implementation="sdpa")
    assert threads.num_threads() == before
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "sdpa"


def test_loading_writes_nothing_to_standard_output(
    files: ModelFiles, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    load_model(files, dtype=torch.float32)
    load_tokenizer(files)
    assert capfd.readouterr().out == ""


def test_code_in_the_folder_is_never_run(files: ModelFiles, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (files.folder / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    config = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.M"},
    }
    (files.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="custom code"):
        load_model(files, dtype=torch.float32)
    assert not marker.exists()


KNOWN_TO_BE_REFUSED = ("qwen2_5_vl", "mistral4", "t5")


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_every_configuration_class_of_transformers_is_read_or_refused(
    tmp_path: Path, *, is_whole: bool
) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    refused: dict[str, str] = {}
    every_tenth = [*list(CONFIG_MAPPING_NAMES)[::10], *KNOWN_TO_BE_REFUSED]
    with quiet_transformers():
        for model_type in CONFIG_MAPPING_NAMES if is_whole else every_tenth:
            config = {"model_type": model_type, "num_hidden_layers": 1}
            (tmp_path / "config.json").write_text(json.dumps(config))
            files = ModelFiles(model_type, tmp_path)
            try:
                is_causal = type(load_config(files)) in MODEL_FOR_CAUSAL_LM_MAPPING
            except UnsupportedModelError:  # its own checks refuse its own defaults
                continue
            try:
                assert load_lazily(files, {}) is None
                assert is_causal
            except UnsupportedModelError as error:
                refused[model_type] = str(error)
    assert {*KNOWN_TO_BE_REFUSED} <= refused.keys()
    assert [message for message in refused.values() if "engine='vllm'" not in message] == []


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "hidden_size": "wide"},
        {"model_type": "llama", "num_attention_heads": 0},
        {"model_type": "llama", "hidden_act": "none of them"},
        {"model_type": "nobody's"},
        {"model_type": 5},
        {},
        [],
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_built_is_refused(tmp_path: Path, config: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in LOADS:
        with pytest.raises(UnsupportedModelError):
            load(ModelFiles("x", tmp_path))


def test_an_unknown_attention_is_refused(files: ModelFiles) -> None:
    with pytest.raises(UnsupportedModelError, match="no_such_attention"):
        load_model(files, dtype=torch.float32, attn_implementation="no_such_attention")


def test_special_tokens_come_only_when_asked_for(
    tmp_path: Path, home: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", more=lambda writer: writer.add_add_bos_token(True))
    tokenizer = load_tokenizer(resolve(str(path)))
    assert home.is_dir()
    bare = tokenizer.encode("the")
    assert tokenizer("the")["input_ids"] == bare
    assert tokenizer(["the"])["input_ids"] == [bare]
    assert tokenizer.encode("the", add_special_tokens=True) == [1, *bare]
    assert tokenizer("the", add_special_tokens=True)["input_ids"] == [1, *bare]


def test_decoding_never_tidies_spaces(files: ModelFiles) -> None:
    config_path = files.folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**config, "clean_up_tokenization_spaces": True}))
    tokenizer = load_tokenizer(files)
    text = "a . b , c ! do n't 's"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_broken_tokenizer_file_is_refused_by_name(files: ModelFiles) -> None:
    (files.folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(files)


def test_importing_models_loads_no_heavy_library() -> None:
    code = "import sys, logprobe.models; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "gguf", "huggingface_hub"} & set(done.stdout.split())


def next_logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([token_ids])).logits[0, -1]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_each_architecture_gives_the_logprobs_of_llama_cpp(
    architecture: str,
    tmp_path: Path,
    home: Path,
    write_gguf: Callable[..., Path],
    llama_cpp: Callable[[Path], Any],
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", architecture)
    model, reference = load_model(resolve(str(path)), dtype=torch.float32), llama_cpp(path)
    assert home.is_dir()
    # 40 tokens: more than gemma3's window of 16. llama.cpp rounds some steps to float16 (0.003 nats here);
    # a window off by one, a wrong theta or layer type costs 0.1 nats and more.
    for num_tokens in (1, 7, 40):
        token_ids = [(7 * place * place + 3 * num_tokens) % 94 + 3 for place in range(num_tokens)]
        expected = reference.next_logprobs(token_ids, num_top=100)
        found = next_logprobs(model, token_ids)
        assert len(expected) == 100
        for token_id, logprob in expected.items():
            assert found[token_id].item() == pytest.approx(logprob, abs=0.01)


@pytest.mark.real_model
@pytest.mark.parametrize(("real_files", "real_gguf"), [("smollm2",) * 2, ("gemma3-270m",) * 2], indirect=True)
def test_a_real_model_agrees_with_llama_cpp_within_its_int8_activations(
    real_files: ModelFiles, real_gguf: Path, llama_cpp: Callable[[Path], Any]
) -> None:
    tokenizer, model = load_tokenizer(real_files), load_model(real_files, dtype=torch.float32)
    token_ids = tokenizer.encode("The capital of France is", add_special_tokens=True)
    expected = llama_cpp(real_gguf).next_logprobs(token_ids, num_top=5)
    found = next_logprobs(model, token_ids)
    assert int(found.argmax()) == next(iter(expected))
    for token_id, logprob in expected.items():
        assert found[token_id].item() == pytest.approx(logprob, abs=0.2)
