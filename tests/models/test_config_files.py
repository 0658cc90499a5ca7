"""`config.json` and `generation_config.json` as read here have the values of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoConfig, Gemma3Config, GenerationConfig

from logprobe.engine.forward.families import FAMILIES, NEUTRAL
from logprobe.engine.forward.reference.settings import settings_of
from logprobe.errors import UnsupportedModelError
from logprobe.models.config_files import ModelConfig, parse_config, read_config, read_generation_config
from logprobe.models.quiet import quiet_transformers

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe.models import ModelFiles

FIELDS = [name for name in ModelConfig.__struct_fields__ if name != "content"]


def saved(model_type: str, folder: Path, **settings: Any) -> Any:
    with quiet_transformers():
        config = AutoConfig.for_model(model_type, **settings)
        config.save_pretrained(folder)
    return config


def check_equal(config: ModelConfig, own: Any) -> None:
    for name in FIELDS:
        value = getattr(own, name, None)
        assert getattr(config, name) == (value.to_dict() if hasattr(value, "to_dict") else value), name


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_saved_configuration_of_each_family_is_that_of_transformers(
    model_type: str, tmp_path: Path
) -> None:
    own = saved(model_type, tmp_path)
    config = read_config(tmp_path)
    check_equal(config, own)
    family = FAMILIES[model_type]
    assert getattr(config, family.activation) == getattr(own, family.activation)
    assert family.factors(config) == family.factors(own)
    assert family.is_parallel(config) == family.is_parallel(own)
    layers = range(own.num_hidden_layers)
    assert [family.rotates(config, layer) for layer in layers] == [
        family.rotates(own, layer) for layer in layers
    ]
    if family.experts is not None:
        assert family.experts.normalises(config) == family.experts.normalises(own)


SPARSE: dict[str, dict[str, Any]] = {
    **{f"{kind} without keys": {"model_type": kind} for kind in FAMILIES},
    "cohere2 with a pattern": {"model_type": "cohere2", "sliding_window_pattern": 3},
    "exaone4 with a pattern": {"model_type": "exaone4", "sliding_window_pattern": 3},
    "gemma with the wrong activation": {"model_type": "gemma", "hidden_act": "gelu"},
    "gemma3 with older keys": {
        "model_type": "gemma3_text",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window_pattern": 4,
    },
    "olmo3 with older keys": {
        "model_type": "olmo3",
        "rope_theta": 1e6,
        "rope_scaling": {"factor": 8.0, "rope_type": "yarn", "original_max_position_embeddings": 512},
    },
    "gpt_neox with older keys": {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 2e4},
    "glm with a part": {"model_type": "glm", "partial_rotary_factor": 0.25},
    "ministral without windows": {"model_type": "ministral", "sliding_window": None},
    "phi3 with su": {
        "model_type": "phi3",
        "max_position_embeddings": 8192,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "yarn", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    },
    "qwen2 with windows": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3},
    "qwen2_moe with windows": {"model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 3},
    "qwen3 with a window": {"model_type": "qwen3", "sliding_window": 99, "use_sliding_window": False},
    "smollm3 with windows": {
        "model_type": "smollm3",
        "use_sliding_window": True,
        "sliding_window": 64,
        "no_rope_layer_interval": 3,
    },
}


@pytest.mark.parametrize("content", SPARSE.values(), ids=SPARSE.keys())
def test_what_a_file_leaves_out_is_as_in_transformers(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with quiet_transformers():
        own = AutoConfig.from_pretrained(tmp_path)
    config, full = read_config(tmp_path), parse_config(own.to_dict())
    family = FAMILIES[content["model_type"]]
    assert config.eos_token_ids == full.eos_token_ids
    assert settings_of(config) == settings_of(full)
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (
        full.vocab_size,
        full.max_position_embeddings,
        full.tie_word_embeddings,
    )
    assert family.unread(config) == family.unread(full)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_defaults_of_each_family_are_those_of_transformers(model_type: str) -> None:
    with quiet_transformers():
        default = parse_config(AutoConfig.for_model(model_type).to_dict())
    names = {*FAMILIES[model_type].reads, *default.content} - NEUTRAL
    # Computed from other keys: `settings_of` does the same.
    computed = {"head_dim", "num_key_value_heads", "layer_types", "no_rope_layers", "_sliding_window_pattern"}
    others = parse_config({"model_type": model_type}).content
    wrong = {name for name in names - computed if default.content.get(name) != others.get(name)}
    assert wrong == set()


OLDER: dict[str, dict[str, Any]] = {
    "theta": {"rope_theta": 5e5},
    "theta and a part": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "linear": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "null": {"rope_theta": 1e4, "rope_scaling": None},
    "llama3": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "yarn": {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
}


@pytest.mark.parametrize("settings", OLDER.values(), ids=OLDER.keys())
def test_rotary_settings_of_older_files_are_read_as_transformers_reads_them(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    content = {"model_type": "llama", "max_position_embeddings": 4096} | settings
    (tmp_path / "config.json").write_text(json.dumps(content))
    with quiet_transformers():
        own = AutoConfig.from_pretrained(tmp_path)
    assert read_config(tmp_path).rope_parameters == own.rope_parameters


def test_the_language_model_of_several_modalities_is_read(tmp_path: Path) -> None:
    own = Gemma3Config(text_config={"hidden_size": 48, "num_attention_heads": 2})
    own.save_pretrained(tmp_path)
    check_equal(read_config(tmp_path), own.text_config)


@pytest.mark.real_model
@pytest.mark.parametrize("real_files", ["smollm2", "gemma3-270m"], indirect=True)
def test_the_configuration_of_a_real_model_is_that_of_transformers(real_files: ModelFiles) -> None:
    check_equal(read_config(real_files.folder), AutoConfig.from_pretrained(real_files.folder))


@pytest.mark.parametrize("eos", [None, 2, [2], [2, 7]])
def test_ids_that_end_a_text(eos: Any, tmp_path: Path) -> None:
    assert read_generation_config(tmp_path).eos_token_ids == frozenset()
    GenerationConfig(eos_token_id=eos, temperature=0.5, do_sample=True).save_pretrained(tmp_path)
    expected = set() if eos is None else {*eos} if isinstance(eos, list) else {eos}
    assert read_generation_config(tmp_path).eos_token_ids == expected
    saved("llama", tmp_path, eos_token_id=eos)
    assert read_config(tmp_path).eos_token_ids == expected


def test_infinity_and_unknown_keys_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x", "limit": [0.0, Infinity], "id": 1e400}')
    config = read_config(tmp_path)
    assert {name: getattr(config, name) for name in FIELDS if getattr(config, name) is not None} == {
        "model_type": "x"
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"model_type": 5}',
        '{"model_type": "llama", "hidden_size": "wide"}',
        '{"model_type": "llama", "hidden_size": 2.5}',
        '{"model_type": "llama", "rope_parameters": [1]}',
        '{"model_type": "llama", "layer_types": 3}',
        "[" * 200_000,
    ],
    ids=range(9),
)
def test_files_that_are_broken_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModelError):
        read_config(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "<eos>"}')
    with pytest.raises(UnsupportedModelError):
        read_generation_config(tmp_path)


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    code = (
        "import sys; from pathlib import Path; from logprobe.models.config_files import read_config; "
        "print(read_config(Path(sys.argv[1])).model_type, *{'torch', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "llama\n"
