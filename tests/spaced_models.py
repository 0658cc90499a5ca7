"""Tokenizers like Llama 2's, which add a space before a text, and a tiny model with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

FORMS: Final = ("prepend", "first", "always")
"""The Prepend normalizer (converted Llama 2 and Mistral), and the two modes of Metaspace."""
NUM_MERGES: Final = 300
SPECIALS: Final = ["<unk>", "<s>", "</s>"]
BYTES: Final = [f"<0x{byte:02X}>" for byte in range(256)]
MARK: Final = "\u2581"
WORDS: Final = "the model of the row and a token in the text that the grammar of a model allows " * 20
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def train_tokenizer(form: str) -> Any:
    """Train a SentencePiece-like BPE of 300 merges with byte fallback; `form` is one of FORMS."""
    from tokenizers import Tokenizer, decoders, models, processors, trainers
    from transformers import PreTrainedTokenizerFast

    unknown, bos, eos = SPECIALS
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token=unknown, fuse_unk=True))
    _set_space(backend, form)
    steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    words = (WORDS + Path(__file__).read_text(encoding="utf-8")).split()
    alphabet = {MARK}.union(*words)
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIALS) + len(BYTES) + len(alphabet) + NUM_MERGES,
        special_tokens=[*SPECIALS, *BYTES],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(words, trainer)
    # The trainer adds the byte tokens as special tokens, which they are not.
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIALS]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=unknown, bos_token=bos, eos_token=eos
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def without_space(tokenizer: Any) -> Any:
    """Return the same tokenizer with a backend that adds no space before a text."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    _set_space(backend, "never")
    return backend


def _set_space(backend: Any, form: str) -> None:
    from tokenizers import normalizers, pre_tokenizers

    if form == "prepend":
        marks = [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
        backend.normalizer = normalizers.Sequence(marks)
    else:
        backend.normalizer = normalizers.Sequence([])
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=form, split=False)


def save_spaced_llama(folder: Path, form: str = "prepend") -> Path:
    """Write a random 2-layer Llama with such a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer(form)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=0.4)  # logits spread over about ten nats
    model.save_pretrained(folder)
    return folder
