"""A tokenizer read without transformers equals transformers' own: ids, offsets, texts, special tokens."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from logprobe.engine.backends.start import text_edge
from logprobe.errors import MissingPackageError, ModelNotFoundError, ParameterError, UnsupportedModelError
from logprobe.models import ModelFiles, Vocabulary, load_tokenizer, resolve
from logprobe.models.fast_tokenizer import TRANSFORMERS_ONLY, FastTokenizer, read_fast_tokenizer
from logprobe.models.tokenizer import ExactTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from logprobe.text.edge import TextEdge

TEXTS = [
    "",
    " ",
    "the cat and the dog,  then\n\n\n\tabab 1234 ",
    "   leading and trailing   ",
    "深度学习 日本語 한국어 العربية हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 é́ Å ﬁ Ⅷ",
    "a\u00a0b\u2003c\u3000d\u200be\u2028f\u0085g\x00h\x04i\x13",
    "<|bos|>the<|eos|> <|eo <s>x</s> <unk> <tag><|user|>hi<|end|><0x0A>",
    "<|im_start|>user\nhi<|im_end|><|endoftext|><bos><eos><start_of_turn>",
    "<extra>the <extra> <split> the",
    "▁marked▁ ▁▁ words",
    "the cat " * 3000,
]
POOLS = [(32, 127), (9, 14), (0xA0, 0x3000), (0x4E00, 0x9FFF), (0x1F300, 0x1F700), (0xE000, 0xE100)]


def many_texts() -> list[str]:
    rng = random.Random(7)  # noqa: S311 - texts, no secret
    drawn = [
        "".join(chr(rng.randrange(*rng.choice(POOLS))) for _ in range(rng.randrange(60))) for _ in range(150)
    ]
    return TEXTS + drawn


def byte_level(*, with_bos: bool) -> Tokenizer:
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("c", "a"), ("ca", "t"), ("Ã", "©")]
    pieces = ["<|bos|>", "<|eos|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if with_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
        )
    return backend


def metaspace() -> Tokenizer:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"thecat",
        "th",
        "▁th",
    ]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("t", "h"), ("▁", "th")],
            unk_token="<unk>",  # noqa: S106 - a vocabulary's word
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def unigram() -> Tokenizer:
    rng = random.Random(1)  # noqa: S311 - scores, no secret
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *fallback, "▁", *"thecat", "th", "▁th"]
    backend = Tokenizer(models.Unigram([(piece, -20 * rng.random()) for piece in pieces], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def cut_and_padded() -> Tokenizer:
    backend = byte_level(with_bos=True)
    backend.enable_truncation(5)
    backend.enable_padding(length=9, pad_id=1, pad_token="<|eos|>")  # noqa: S106 - a vocabulary's word
    return backend


TEMPLATE = "{{ messages[0].content }}"
BOS_EOS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
KINDS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any]]] = {
    "byte level": (lambda: byte_level(with_bos=False), {"eos_token": "<|eos|>"}),
    "byte level with BOS": (lambda: byte_level(with_bos=True), BOS_EOS),
    "BOS by the settings": (lambda: byte_level(with_bos=False), BOS_EOS | {"add_bos_token": True}),
    "without special tokens": (lambda: byte_level(with_bos=False), {}),
    "special tokens split": (lambda: byte_level(with_bos=True), BOS_EOS | {"split_special_tokens": True}),
    "tokens added": (
        lambda: byte_level(with_bos=True),
        BOS_EOS | {"additional_special_tokens": [AddedToken("<extra>", lstrip=True), "<split>"]},
    ),
    "cut and padded": (cut_and_padded, BOS_EOS),
    "metaspace": (metaspace, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "Unigram": (unigram, {"unk_token": "<unk>"}),
    "special tokens that the backend lacks": (
        lambda: byte_level(with_bos=False),
        {"bos_token": "<new bos>", "eos_token": AddedToken("<new eos>", rstrip=True), "mask_token": "<mask>"},
    ),
    "tokens with names of the model's own": (
        lambda: byte_level(with_bos=True),
        BOS_EOS | {"extra_special_tokens": {"image_token": "<image>", "audio_token": "<|eos|>"}},
    ),
}
Files = dict[str, Any]
# Files that transformers of earlier versions wrote, or that people edited.
ROLES = {"bos_token": {"content": "<|bos|>", "lstrip": True}, "eos_token": "<|eos|>"}
OTHER_FILES: dict[str, Files] = {
    "no settings": {},
    "empty settings": {"tokenizer_config.json": {}},
    "a limit beyond any integer": {"tokenizer_config.json": {"model_max_length": int(1e30)} | BOS_EOS},
    "infinity": {"tokenizer_config.json": {"model_max_length": float("inf")} | BOS_EOS},
    "null tokens": {"tokenizer_config.json": {"bos_token": None, "eos_token": "<|eos|>", "pad_token": None}},
    "BOS and EOS by the settings": {
        "tokenizer_config.json": BOS_EOS | {"add_bos_token": True, "add_eos_token": True}
    },
    "tokens as objects": {
        "tokenizer_config.json": {
            "bos_token": {"__type": "AddedToken", "content": "<|bos|>", "normalized": True},
            "sep_token": {"__type": "AddedToken", "content": "<sep>", "lstrip": True},
            "boi_token": {"__type": "AddedToken", "content": "<boi>"},
        }
    },
    "older additional tokens": {
        "tokenizer_config.json": BOS_EOS | {"additional_special_tokens": ["<extra>", "<split>", "the"]}
    },
    "both kinds of extra tokens": {
        "tokenizer_config.json": {"additional_special_tokens": ["<a>"], "extra_special_tokens": ["<b>"]}
    },
    "extra tokens are null": {
        "tokenizer_config.json": {"additional_special_tokens": ["<a>"], "extra_special_tokens": None}
    },
    "added tokens by id": {
        "tokenizer_config.json": BOS_EOS
        | {
            "added_tokens_decoder": {
                "1": {"content": "<|eos|>", "special": True},
                "400": {"content": "<extra>", "lstrip": True, "special": False},
                "300": {"content": "cat", "single_word": True, "special": False},
            },
            "cls_token": "<extra>",
        },
        "special_tokens_map.json": {"bos_token": "<|eos|>"},
        "added_tokens.json": {"<unread>": 500},
    },
    "no added tokens": {
        "tokenizer_config.json": {"added_tokens_decoder": {}} | BOS_EOS,
        "special_tokens_map.json": {"unk_token": "<unk>"},
    },
    "a map of special tokens": {
        "tokenizer_config.json": {"eos_token": "<|bos|>"},
        "special_tokens_map.json": ROLES | {"additional_special_tokens": ["<extra>", "<split>"]},
    },
    "a map of extra tokens": {
        "tokenizer_config.json": {"extra_special_tokens": ["<tag>", "<extra>"]},
        "special_tokens_map.json": ROLES
        | {"extra_special_tokens": ["<extra>", {"content": "<split>", "lstrip": True}]},
    },
    "a map of named tokens": {
        "tokenizer_config.json": {"image_token": "<image>"},
        "special_tokens_map.json": {"extra_special_tokens": {"audio_token": "<audio>"}},
    },
    "a map that asks for BOS": {"special_tokens_map.json": ROLES | {"add_bos_token": True}},
    "a map that asks for a BOS that is not there": {
        "special_tokens_map.json": {"add_bos_token": True, "add_eos_token": True, "eos_token": "<|eos|>"}
    },
    "added tokens of a file": {
        "tokenizer_config.json": BOS_EOS | {"pad_token": "<pad>"},
        "added_tokens.json": {"<pad>": 301, "<plain>": 300, "Ġthe": 299},
    },
    "a token without content": {
        "tokenizer_config.json": {"eos_token": {"__type": "AddedToken", "lstrip": True}}
    },
    "an unknown token": {"tokenizer_config.json": {"unk_token": "the", "pad_token": ""}},
}


def files_of(folder: Path, backend: Tokenizer, special: dict[str, Any]) -> ModelFiles:
    """A model's folder, of which nothing but the tokenizer is read here."""
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=backend, chat_template=TEMPLATE, **special).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return ModelFiles(str(folder), folder)


def write(folder: Path, content: Files, backend: Tokenizer | None = None) -> ModelFiles:
    """Write a model's folder, of which nothing but the tokenizer is read here."""
    folder.mkdir(exist_ok=True)
    backend = byte_level(with_bos=True) if backend is None else backend
    for name, value in content.items():
        (folder / name).parent.mkdir(exist_ok=True)
        text = value if name.endswith(".jinja") else json.dumps(value)
        (folder / name).write_text(text, encoding="utf-8")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return ModelFiles(str(folder), folder)


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    return files_of(tmp_path / "model", byte_level(with_bos=True), BOS_EOS)


def read(files: ModelFiles) -> FastTokenizer:
    fast = read_fast_tokenizer(files.folder)
    assert isinstance(fast, FastTokenizer)
    return fast


def check_twin(edge: TextEdge, files: ModelFiles, texts: Sequence[str] = TEXTS) -> None:
    assert edge.fast is not None
    own = load_tokenizer(files)
    for text in texts:
        coded = own(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        assert edge.plain_ids(text) == coded["input_ids"]
        try:
            ids, starts = edge.encode_with_starts(text)
        except ParameterError:  # what the tokenizer would drop is refused
            assert not set(edge.vocabulary.missing_bytes).isdisjoint(text.encode())
            continue
        assert ids.tolist() == coded["input_ids"]
        assert starts.tolist() == [start for start, _ in coded["offset_mapping"]]
        whole = own.encode(text, add_special_tokens=True, verbose=False)
        assert edge.encode(text).tolist() == whole
    vocabulary = Vocabulary.from_tokenizer(own)
    every_id = range(len(vocabulary))
    assert len(edge.vocabulary) == len(vocabulary)
    assert [*map(edge.vocabulary.token_text, every_id)] == [*map(vocabulary.token_text, every_id)]
    assert edge.vocabulary.bytes_of(every_id) == vocabulary.bytes_of(every_id)
    assert (edge.bos_token_id, edge.eos_token_id) == (own.bos_token_id, own.eos_token_id)
    assert edge.special_token_ids == set(own.all_special_ids) - {None}
    check_own(read(files), own)


def check_own(fast: FastTokenizer, own: Any) -> None:
    """Compare what the reader itself gives, and the whole backend."""
    for text in TEXTS:
        for adds in (False, True):
            options = {"return_offsets_mapping": True, "return_special_tokens_mask": True, "verbose": False}
            coded = own(text, add_special_tokens=adds, **options)
            encoding = fast.encode(text, add_special_tokens=adds)
            assert encoding.ids == coded["input_ids"]
            assert encoding.offsets == coded["offset_mapping"]
            assert encoding.special_tokens_mask == coded["special_tokens_mask"]
            for skips in (False, True):
                decoded = own.decode(coded["input_ids"], skip_special_tokens=skips)
                assert fast.decode(encoding.ids, skip_special_tokens=skips) == decoded
    assert fast.special_tokens_map == own.special_tokens_map
    assert [*fast.special_tokens_map] == [*own.special_tokens_map]
    assert [*fast.extra_special_tokens] == own.extra_special_tokens
    assert fast.all_special_ids == [token_id for token_id in own.all_special_ids if token_id is not None]
    assert fast.chat_template == own.chat_template
    assert fast.response_template == own.response_template
    own.backend_tokenizer.no_truncation()  # as its next call does
    own.backend_tokenizer.no_padding()
    assert fast.backend.to_str() == own.backend_tokenizer.to_str()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_transformers_saved_is_its_own(kind: str, tmp_path: Path) -> None:
    make, special = KINDS[kind]
    files = files_of(tmp_path / "model", make(), special)
    check_twin(text_edge(files), files, many_texts())


@pytest.mark.parametrize("content", OTHER_FILES.values(), ids=OTHER_FILES.keys())
@pytest.mark.parametrize("with_bos", [False, True])
def test_other_files_are_read_as_transformers_reads_them(
    content: Files,
    with_bos: bool,
    tmp_path: Path,
) -> None:
    files = write(tmp_path / "model", content, byte_level(with_bos=with_bos))
    check_twin(text_edge(files), files)


TEMPLATES: dict[str, Files] = {
    "of the settings": {"tokenizer_config.json": {"chat_template": TEMPLATE}},
    "a list": {
        "tokenizer_config.json": {
            "chat_template": [
                {"name": "default", "template": TEMPLATE},
                {"name": "tool_use", "template": "{{ tools }}"},
            ]
        }
    },
    "a file": {"chat_template.jinja": "a\r\nb\rc\n", "tokenizer_config.json": {"chat_template": TEMPLATE}},
    "more files": {
        "chat_template.jinja": TEMPLATE,
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
        "additional_chat_templates/rag.jinja": "{{ documents }}",
    },
    "no default": {"additional_chat_templates/rag.jinja": "{{ documents }}"},
    "of replies": {"tokenizer_config.json": {"response_template": {"fields": {"content": {}}}}},
}


@pytest.mark.parametrize("content", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_templates_are_those_that_transformers_reads(content: Files, tmp_path: Path) -> None:
    files = write(tmp_path / "model", content)
    own, fast = load_tokenizer(files), read(files)
    assert fast.chat_template == own.chat_template
    assert fast.response_template == own.response_template


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_tokenizer_of_a_gguf_file_is_transformers_own(
    kind: str, tmp_path: Path, home: Path, write_gguf: Callable[..., Path]
) -> None:
    files = resolve(str(write_gguf(tmp_path / "tiny.gguf", kind=kind, rule="smollm")))
    assert home.exists()
    check_twin(text_edge(files), files, many_texts())


@pytest.mark.real_model
@pytest.mark.parametrize("real_files", ["smollm2", "gemma3-270m"], indirect=True)
def test_the_tokenizer_of_a_real_model_is_transformers_own(real_files: ModelFiles) -> None:
    check_twin(text_edge(real_files), real_files, many_texts())


@pytest.mark.parametrize("key", TRANSFORMERS_ONLY)
def test_settings_that_change_the_backend_are_left_to_transformers(
    key: str, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files.folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: ["tokenizer.4.0.0.json"]}))
    assert read_fast_tokenizer(files.folder) == key
    if key == "fast_tokenizer_files":
        byte_level(with_bos=False).save(str(files.folder / "tokenizer.4.0.0.json"))
        edge = text_edge(files)
        assert edge.fast is None
        assert edge.encode("the").tolist() == load_tokenizer(files).encode("the", add_special_tokens=True)
        assert edge.encode("the")[0] != edge.bos_token_id
    monkeypatch.setattr("logprobe.engine.backends.start.find_spec", lambda _: None)
    with pytest.raises(MissingPackageError, match="transformers"):
        text_edge(files)


BROKEN: dict[str, Files] = {
    "a list": {"tokenizer_config.json": []},
    "a token that is a number": {"tokenizer_config.json": {"eos_token": 5}},
    "extra tokens that are a text": {"tokenizer_config.json": {"extra_special_tokens": "<a>"}},
    "a name that is a number": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": 5}}},
    "added tokens that are texts": {"tokenizer_config.json": {"added_tokens_decoder": {"1": "<|eos|>"}}},
    "a template that is a number": {"tokenizer_config.json": {"chat_template": 5}},
    "templates without names": {"tokenizer_config.json": {"chat_template": [TEMPLATE]}},
    "a map that is a list": {"special_tokens_map.json": []},
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_files_that_are_broken_are_refused(content: Files, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        text_edge(write(tmp_path / "model", content))


def test_a_tokenizer_without_a_fast_form_asks_for_transformers(files: ModelFiles) -> None:
    (files.folder / "tokenizer.json").rename(files.folder / "vocab.json")
    for load in (lambda: text_edge(files), lambda: resolve(str(files.folder))):
        with pytest.raises(ModelNotFoundError, match="transformers"):
            load()


def test_transformers_tokenizer_is_loaded_once_and_when_asked_for(files: ModelFiles) -> None:
    edge = text_edge(files)
    assert edge.template_source is edge.fast
    own = edge.tokenizer
    assert type(own) is ExactTokenizer
    assert own is edge.tokenizer
    assert own is edge.template_source
    assert own.chat_template == TEMPLATE


def test_what_a_caller_does_with_the_tokenizer_cuts_no_prompt_off(files: ModelFiles) -> None:
    edge = text_edge(files)
    ids = edge.encode("the cat and <|eos|>")
    own = {"truncation": True, "padding": "max_length", "max_length": 3, "split_special_tokens": True}
    for backend in (edge.backend, edge.tokenizer.backend_tokenizer):
        backend.enable_truncation(2)
        backend.enable_padding(length=9)
        backend.encode_special_tokens = True
    edge.tokenizer.pad_token = "<|eos|>"  # noqa: S105 - a vocabulary's word
    assert len(edge.tokenizer("the cat and <|eos|>", **own)["input_ids"]) == 3
    assert np.array_equal(edge.encode("the cat and <|eos|>"), ids)


WITHOUT = """
import sys
from pathlib import Path
from logprobe.models.fast_tokenizer import read_fast_tokenizer
from logprobe.text.templates import render_chat
fast = read_fast_tokenizer(Path(sys.argv[1]))
print(fast.decode(fast.encode("the cat", add_special_tokens=True).ids))
print(render_chat(fast.chat_template, [{"role": "user", "content": "hi"}]))
print(*sorted({"torch", "transformers"} & sys.modules.keys()))
"""


def test_neither_torch_nor_transformers_is_imported(files: ModelFiles) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(files.folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["<|bos|>the cat", "hi", ""]
