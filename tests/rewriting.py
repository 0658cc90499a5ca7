"""Tokenizers that rewrite texts, as replacements for a tiny model's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers

from conftest import save_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _swallow_spaces(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("dog", lstrip=True, rstrip=True, normalized=False)])


def _normalise(normalizer: Any) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        tokenizer.normalizer = normalizer

    return change


REWRITES: dict[str, Callable[[Tokenizer], None]] = {
    "nfc": _normalise(normalizers.NFC()),
    "nfkc": _normalise(normalizers.NFKC()),
    "lower case": _normalise(normalizers.Lowercase()),
    "no accents": _normalise(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "one space": _normalise(normalizers.Replace(Regex(" {2,}"), " ")),
    "stripped": _normalise(normalizers.Strip()),
    "swallowed spaces": _swallow_spaces,
}


def save_rewriting_llama(folder: Path, name: str) -> Path:
    """Write the tiny Llama with a tokenizer of `REWRITES`; its vocabulary and weights stay the same."""
    save_tiny_llama(folder)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    REWRITES[name](tokenizer)
    tokenizer.save(path)
    return folder


def save_sentencepiece_llama(folder: Path) -> Path:
    """Write the tiny Llama with a tokenizer like Llama 2's: ▁ for spaces, one in front, byte fallback."""
    save_tiny_llama(folder)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"theca", "▁t", "▁th"]
    pieces += ["▁the"]
    model = {
        "type": "BPE",
        "vocab": {piece: token_id for token_id, piece in enumerate(pieces)},
        "merges": ["▁ t", "▁t h", "▁th e"],
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
    }
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text()) | {
        "added_tokens": [
            {"id": token_id, "content": piece, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for token_id, piece in enumerate(pieces[:3])
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": model,
    }
    path.write_text(json.dumps(state))
    settings = folder / "tokenizer_config.json"
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | names))
    return folder
