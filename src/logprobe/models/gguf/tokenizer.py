"""Write a GGUF file's tokenizer: vocabulary, merges, pre-tokenizer, special tokens, chat template.

The file only has a name for its pre-tokenizer (`tokenizer.ggml.pre`), so a table maps names to rules. An
unknown name is an error, because a wrong rule gives other tokens.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from logprobe.errors import UnsupportedModelError
from logprobe.models.fast_tokenizer import CHAT_TEMPLATE, SETTINGS, TOKENIZER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tokenizers import AddedToken, Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

    from logprobe.models.gguf.file import GgufFile

# Token types of the GGUF format (`tokenizer.ggml.token_type`).
_NORMAL: Final = 1
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
MAX_TOKEN_CHARS: Final = 4096  # the time to find merges is quadratic in this
_SPACE_MARK: Final = "▁"

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SPACES: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def write_tokenizer(gguf: GgufFile, folder: Path) -> None:
    """Write the tokenizer files for a GGUF file, in the format of transformers.

    With `add_special_tokens=True`, the tokenizer adds BOS and EOS as the file specifies.

    Raises:
        UnsupportedModelError: the kind of vocabulary or the pre-tokenizer is not supported.
    """
    model = gguf.value("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{gguf.path.name}: tokenizer model {model!r:.80} is not supported (supported: gpt2, llama); "
            "use the model's safetensors folder or hub id instead"
        )
    backend = _byte_level(gguf) if model == "gpt2" else _sentencepiece(gguf)
    backend.add_tokens(_added_tokens(gguf))
    _add_edges(gguf, backend)
    template = gguf.value("tokenizer.chat_template", None)
    if not isinstance(template, str | None):
        raise UnsupportedModelError(
            f"{gguf.path.name}: tokenizer.chat_template is not a string; fetch a complete file"
        )
    settings = {
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": gguf.value(".context_length"),
        "tokenizer_class": "TokenizersBackend",
        **_special_tokens(gguf),
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    backend.save(str(folder / TOKENIZER))
    if template is not None:
        (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def _vocabulary(gguf: GgufFile) -> dict[str, int]:
    tokens = gguf.value("tokenizer.ggml.tokens")
    longest = max(map(len, tokens), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise UnsupportedModelError(
            f"{gguf.path.name}: the vocabulary has a token of {longest} characters; at most "
            f"{MAX_TOKEN_CHARS} are supported; use the model's safetensors folder or hub id instead"
        )
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise UnsupportedModelError(
            f"{gguf.path.name}: the vocabulary has the same token twice, which is not supported; "
            "use the model's safetensors folder or hub id instead"
        )
    return vocabulary


def _byte_level(gguf: GgufFile) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    rule = gguf.value("tokenizer.ggml.pre", "default")
    make = _RULES.get(rule)
    if make is None:
        raise UnsupportedModelError(
            f"{gguf.path.name}: pre-tokenizer {rule!r:.80} (tokenizer.ggml.pre) is not supported "
            f"(supported: {', '.join(_RULES)}); use the model's safetensors folder or hub id instead"
        )
    merges = [tuple(merge.split(" ")) for merge in gguf.value("tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab=_vocabulary(gguf), merges=merges, ignore_merges=rule == "llama-bpe"))
    backend.pre_tokenizer = make()
    backend.decoder = decoders.ByteLevel()
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _gpt2_rule() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_rule() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_rule()])


def _pattern_rule(digits: str) -> Callable[[], PreTokenizer]:
    def make() -> PreTokenizer:
        from tokenizers import Regex, pre_tokenizers

        pattern = Regex(f"{_CONTRACTIONS}|{_WORDS_AND_SPACES % digits}")
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return make


_RULES: Final[Mapping[str, Callable[[], PreTokenizer]]] = {
    "gpt-2": _gpt2_rule,
    "smollm": _smollm_rule,
    "llama-bpe": _pattern_rule(r"\p{N}{1,3}"),
    "qwen2": _pattern_rule(r"\p{N}"),
}


def _sentencepiece(gguf: GgufFile) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = _vocabulary(gguf)
    unknown = gguf.value("tokenizer.ggml.tokens")[gguf.token_id("unknown") or 0]
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_of_scores(gguf, vocabulary),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=unknown,
        )
    )
    marks: list[Any] = [normalizers.Replace(" ", _SPACE_MARK)]
    pieces: list[Any] = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gguf.value("tokenizer.ggml.add_space_prefix", default=True):
        marks.insert(0, normalizers.Prepend(_SPACE_MARK))
        pieces.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(marks)
    backend.decoder = decoders.Sequence(pieces)
    return backend


def _merges_of_scores(gguf: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """List every pair of pieces whose concatenation is a piece, by descending score of that piece."""
    scores, types = gguf.value("tokenizer.ggml.scores"), gguf.value("tokenizer.ggml.token_type")
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, token_id in vocabulary.items():
        if types[token_id] != _NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left is not None and right is not None:
                merges.append((-scores[token_id], left, right, (piece[:cut], piece[cut:])))
    merges.sort(key=lambda merge: merge[:3])
    return [pair for *_, pair in merges]


def _added_tokens(gguf: GgufFile) -> list[AddedToken]:
    from tokenizers import AddedToken

    types = gguf.value("tokenizer.ggml.token_type")
    return [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(gguf.value("tokenizer.ggml.tokens"), types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _special_tokens(gguf: GgufFile) -> dict[str, str]:
    tokens = gguf.value("tokenizer.ggml.tokens")
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: gguf.token_id(key) for name, key in keys.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _add_edges(gguf: GgufFile, backend: Tokenizer) -> None:
    """Make the tokenizer add BOS and EOS as the file specifies."""
    from tokenizers.processors import TemplateProcessing

    # llama.cpp's defaults for files without these keys.
    by_kind = (
        gguf.value("tokenizer.ggml.model") == "llama" or gguf.value("tokenizer.ggml.pre", "") == "llama-bpe"
    )
    specials = _special_tokens(gguf)
    bos = specials.get("bos_token") if gguf.value("tokenizer.ggml.add_bos_token", by_kind) else None
    eos = specials.get("eos_token") if gguf.value("tokenizer.ggml.add_eos_token", default=False) else None
    if bos or eos:
        single = [part for part in (bos, "$A", eos) if part]
        pair = [part for part in (bos, "$A", eos, bos, "$B", eos) if part]
        ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token]
        backend.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=ids)
