"""A kept tokenizer is transformers' own, in ids, places, bytes and special ids; or it is loaded anew."""

from __future__ import annotations

import json
import random
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from logprobe.engine.backends.start import text_edge
from logprobe.errors import ParameterError
from logprobe.models import ModelFiles, Vocabulary, load_tokenizer, resolve
from logprobe.models.stored.store import LoadStore
from logprobe.models.stored.tokenizer import FACTS, TOKENIZER, TokenizerFacts, exact_state
from logprobe.models.tokenizer import ExactTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
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


def texts() -> list[str]:
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
}


def files_of(folder: Path, backend: Tokenizer, special: dict[str, Any]) -> ModelFiles:
    """A model's folder, of which nothing but the tokenizer is read here."""
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=backend, chat_template=TEMPLATE, **special).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return ModelFiles(str(folder), folder)


@pytest.fixture
def files(tmp_path: Path, home: Path) -> ModelFiles:
    assert not home.exists()
    return files_of(tmp_path / "model", byte_level(with_bos=True), BOS_EOS)


def kept(files: ModelFiles) -> bool:
    store = LoadStore.of(files)
    assert store is not None
    return store.tokenizer() is not None


def kept_folder(home: Path) -> Path:
    (facts,) = home.glob(f"loads/*/{FACTS}")
    return facts.parent


def check_twin(edge: TextEdge, files: ModelFiles) -> None:
    own = load_tokenizer(files)
    for text in texts():
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
    assert edge.special_token_ids == set(own.all_special_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_tokenizer_is_transformers_own(kind: str, tmp_path: Path, home: Path) -> None:
    make, special = KINDS[kind]
    files = files_of(tmp_path / "model", make(), special)
    check_twin(text_edge(files), files)
    assert home.exists()
    assert kept(files)
    check_twin(text_edge(files), files)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_kept_tokenizer_of_a_gguf_file_is_transformers_own(
    kind: str, tmp_path: Path, home: Path, write_gguf: Callable[..., Path]
) -> None:
    files = resolve(str(write_gguf(tmp_path / "tiny.gguf", kind=kind, rule="smollm")))
    text_edge(files)
    assert home.exists()
    assert kept(files)
    check_twin(text_edge(files), files)


@pytest.mark.real_model
@pytest.mark.parametrize("real_files", ["smollm2"], indirect=True)
def test_a_kept_tokenizer_of_a_real_model_is_transformers_own(real_files: ModelFiles) -> None:
    text_edge(real_files)
    assert kept(real_files)
    check_twin(text_edge(real_files), real_files)


def test_what_would_come_back_otherwise_is_not_kept(files: ModelFiles) -> None:
    backend = unigram()  # of scores that no JSON held
    assert exact_state(backend) is None
    store = LoadStore.of(files)
    assert store is not None
    store.write_tokenizer(backend, TokenizerFacts.of(load_tokenizer(files)))
    assert not kept(files)


def test_a_home_that_cannot_be_written_keeps_nothing(files: ModelFiles, home: Path) -> None:
    home.write_text("no folder")
    for _ in range(2):
        check_twin(text_edge(files), files)
        assert not kept(files)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def change_a_token(path: Path) -> None:
    data = path.read_bytes()
    assert b'"cat"' in data
    path.write_bytes(data.replace(b'"cat"', b'"dog"'))


def change_eos(path: Path) -> None:
    data = path.read_bytes()
    assert b'"eos_token_id":1' in data
    path.write_bytes(data.replace(b'"eos_token_id":1', b'"eos_token_id":2'))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (TOKENIZER, shorten),
        (TOKENIZER, change_a_token),
        (TOKENIZER, lambda path: path.unlink()),
        (TOKENIZER, lambda path: path.write_text(byte_level(with_bos=False).to_str())),
        (FACTS, shorten),
        (FACTS, change_eos),
        (FACTS, lambda path: path.write_bytes(b"\xff\x00")),
        (FACTS, lambda path: path.write_text("[]")),
        (FACTS, lambda path: path.unlink()),
    ],
)
def test_what_is_damaged_is_loaded_anew(
    name: str, damage: Callable[[Path], Any], files: ModelFiles, home: Path
) -> None:
    text_edge(files)
    folder = kept_folder(home)
    damage(folder / name)
    assert not kept(files)
    check_twin(text_edge(files), files)
    assert kept(files)
    assert kept_folder(home) == folder


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_changed_files_are_loaded_anew(name: str, files: ModelFiles, tmp_path: Path) -> None:
    text_edge(files)
    if name == "tokenizer.json":
        other = files_of(tmp_path / "other", byte_level(with_bos=False), BOS_EOS)
        shutil.copy(other.folder / name, files.folder / name)
    else:
        config = json.loads((files.folder / name).read_text())
        (files.folder / name).write_text(json.dumps(config | {"eos_token": "<|bos|>"}))
    assert not kept(files)
    check_twin(text_edge(files), files)
    assert kept(files)


def test_transformers_tokenizer_of_a_kept_one_is_loaded_once(files: ModelFiles) -> None:
    first = text_edge(files).tokenizer
    edge = text_edge(files)
    later = edge.tokenizer
    assert type(later) is type(first) is ExactTokenizer
    assert later is edge.tokenizer
    assert later.chat_template == first.chat_template == TEMPLATE
    assert later.backend_tokenizer.to_str() == first.backend_tokenizer.to_str()


def test_what_a_caller_does_with_the_tokenizer_cuts_no_prompt_off(files: ModelFiles) -> None:
    for edge in (text_edge(files), text_edge(files)):
        ids = edge.encode("the cat and <|eos|>")
        own = {"truncation": True, "padding": "max_length", "max_length": 3, "split_special_tokens": True}
        edge.tokenizer.pad_token = "<|eos|>"  # noqa: S105 - a vocabulary's word
        assert len(edge.tokenizer("the cat and <|eos|>", **own)["input_ids"]) == 3
        assert np.array_equal(edge.encode("the cat and <|eos|>"), ids)
