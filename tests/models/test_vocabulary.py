from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from logprobe.errors import ParameterError, UnsupportedModelError
from logprobe.models import ModelFiles, Vocabulary, load_tokenizer, resolve
from logprobe.models.gguf.file import GgufFile
from logprobe.models.gguf.tokenizer import write_tokenizer
from logprobe.models.tokenizer import ExactTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, write_gguf: Callable[..., Any]) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gguf")
    return {
        kind: written(GgufFile(write_gguf(folder / f"{kind}.gguf", kind=kind, rule="smollm")), folder / kind)
        for kind in ("gpt2", "llama")
    }


def written(gguf: GgufFile, folder: Path) -> Any:
    folder.mkdir()
    write_tokenizer(gguf, folder)
    return ExactTokenizer.from_pretrained(folder, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Vocabulary]:
    return loaded("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> tuple[Any, Vocabulary]:
    return loaded("gemma3-270m")


def loaded(name: str) -> tuple[Any, Vocabulary]:
    tokenizer = load_tokenizer(resolve(name))
    return tokenizer, Vocabulary.from_tokenizer(tokenizer)


@settings(deadline=None)
@given(st.text())
def test_byte_level_bytes_are_the_texts(tiny: dict[str, Any], text: str) -> None:
    vocabulary = Vocabulary.from_tokenizer(tiny["gpt2"])
    assert vocabulary.bytes_of(tiny["gpt2"].encode(text, add_special_tokens=False)) == text.encode()


@settings(deadline=None)
@given(st.text())
def test_marked_space_bytes_are_the_texts_after_one_space(tiny: dict[str, Any], text: str) -> None:
    vocabulary = Vocabulary.from_tokenizer(tiny["llama"])
    found = vocabulary.bytes_of(tiny["llama"].encode(text, add_special_tokens=False))
    assert found == (f" {text}" if text else "").replace("▁", " ").encode()


@pytest.mark.real_model
@settings(deadline=None, max_examples=500)
@given(st.text())
def test_smollm2_bytes_are_the_texts_without_those_it_lacks(
    smollm2: tuple[Any, Vocabulary], text: str
) -> None:
    tokenizer, vocabulary = smollm2
    kept = text.encode().translate(None, delete=vocabulary.missing_bytes)
    assert vocabulary.bytes_of(tokenizer.encode(text, add_special_tokens=False)) == kept


@pytest.mark.real_model
@settings(deadline=None, max_examples=500)
@given(st.text())
def test_gemma3_bytes_are_the_texts(gemma3: tuple[Any, Vocabulary], text: str) -> None:
    tokenizer, vocabulary = gemma3
    found = vocabulary.bytes_of(tokenizer.encode(text, add_special_tokens=False))
    assert found == text.replace("▁", " ").encode()


@pytest.mark.real_model
def test_smollm2_lacks_only_controls_and_bytes_of_no_assigned_character(
    smollm2: tuple[Any, Vocabulary],
) -> None:
    _, vocabulary = smollm2
    assert [byte for byte in vocabulary.missing_bytes if byte < 0xC0] == [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D]
    assert {byte for byte in vocabulary.missing_bytes if byte >= 0xC0} <= {
        0xC0,
        0xC1,
        0xF1,
        0xF2,
        *range(0xF5, 256),
    }


@pytest.mark.real_model
def test_gemma3_lacks_no_byte(gemma3: tuple[Any, Vocabulary]) -> None:
    assert gemma3[1].missing_bytes == b""


class Counting:
    """A tokenizer that counts what it is asked."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.num_asked = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        self.num_asked += 1
        return getattr(self.tokenizer, name)


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("real_files", "num_ids"), [("smollm2", 49_152), ("gemma3-270m", 262_144)], indirect=["real_files"]
)
def test_a_real_vocabulary_is_read_whole_not_by_the_token(real_files: ModelFiles, num_ids: int) -> None:
    # A call into the tokenizer for each id would take seconds.
    counting = Counting(load_tokenizer(real_files).backend_tokenizer)
    assert len(Vocabulary.from_tokenizer(counting)) == num_ids  # type: ignore[arg-type]
    assert counting.num_asked <= 4


@pytest.mark.real_model
@pytest.mark.parametrize("real_files", ["smollm2", "gemma3-270m"], indirect=True)
def test_whole_pieces_read_as_the_tokenizer_decodes_them(real_files: ModelFiles) -> None:
    tokenizer = load_tokenizer(real_files)
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    for token_id in range(0, len(vocabulary), 97):
        decoded = tokenizer.decode([token_id])
        if "\ufffd" not in decoded:
            assert vocabulary.token_text(token_id) == decoded


def test_special_tokens_are_their_own_text(tiny: dict[str, Any]) -> None:
    vocabulary = Vocabulary.from_tokenizer(tiny["gpt2"])
    assert vocabulary.token_bytes(1) == b"<|user|>"
    assert vocabulary.token_text(2) == "<tag>"


def test_byte_tokens_are_one_byte(tiny: dict[str, Any]) -> None:
    vocabulary = Vocabulary.from_tokenizer(tiny["llama"])
    assert [vocabulary.token_bytes(4 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert vocabulary.token_text(4 + 0xE2) == "\\xe2"
    assert vocabulary.token_text(4 + 0x41) == "A"


def test_an_id_beyond_the_tokenizer_has_no_bytes_and_its_number_as_text(tiny: dict[str, Any]) -> None:
    vocabulary = Vocabulary.from_tokenizer(tiny["gpt2"])
    beyond = len(vocabulary) + 5
    assert vocabulary.token_bytes(beyond) == b""
    assert vocabulary.token_text(beyond) == f"<{beyond}>"
    assert vocabulary.bytes_of([1, beyond]) == b"<|user|>"


def test_a_hole_in_the_ids_is_known_from_an_empty_piece() -> None:
    vocabulary = Vocabulary([b"a", None, b"", b"\xf0\x9f"])
    assert [vocabulary.token_text(token_id) for token_id in range(4)] == ["a", "<1>", "", "\\xf0\\x9f"]
    assert len(vocabulary) == 4


def test_a_negative_id_is_a_parameter_error() -> None:
    with pytest.raises(ParameterError, match="token_id: must be >= 0, got -1"):
        Vocabulary([b"a"]).token_bytes(-1)


def test_a_bare_tokenizers_object_will_do(tiny: dict[str, Any]) -> None:
    whole, bare = (Vocabulary.from_tokenizer(part) for part in (tiny["gpt2"], tiny["gpt2"].backend_tokenizer))
    assert [whole.token_bytes(i) for i in range(len(whole))] == [
        bare.token_bytes(i) for i in range(len(bare))
    ]


def test_a_metaspace_decoder_gives_spaces() -> None:
    backend = Tokenizer(models.BPE(vocab={"▁a": 0, "b": 1}, merges=[]))
    backend.decoder = decoders.Metaspace()
    assert Vocabulary.from_tokenizer(backend).bytes_of([0, 1]) == b" ab"


def test_a_piece_outside_the_byte_alphabet_is_as_it_is_written() -> None:
    backend = Tokenizer(models.BPE(vocab={"Ġa": 0, "深": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary.from_tokenizer(backend)
    assert vocabulary.token_bytes(0) == b" a"
    assert vocabulary.token_text(1) == "深" == backend.decode([1])


@pytest.mark.parametrize("is_in_alphabet", [True, False], ids=["alphabet", "any"])
def test_byte_level_pieces_are_those_of_a_loop_over_their_characters(is_in_alphabet: bool) -> None:
    """Pieces of one and two characters from U+0000 to U+017F, beside GPT-2's table of characters."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(shifted)}
    characters = [*table] if is_in_alphabet else [chr(code) for code in range(0x180)]
    pieces = [*characters, *map("".join, product(characters, characters[::7]))]

    def want(piece: str) -> bytes:
        return bytes(map(table.__getitem__, piece)) if {*piece} <= {*table} else piece.encode()

    backend = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, pieces[0]))
    backend.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary.from_tokenizer(backend)
    assert [*map(vocabulary.token_bytes, range(len(pieces)))] == [*map(want, pieces)]


def test_byte_level_pieces_are_read_alike_alone_and_together() -> None:
    together = Tokenizer(models.BPE(vocab={"Ġa": 0, "éĊ": 1, "b c": 2, "Ġ d": 3, "": 4, "ÿ": 5}, merges=[]))
    together.decoder = decoders.ByteLevel()
    plain = Tokenizer(models.BPE(vocab={"Ġa": 0, "éĊ": 1, "": 4, "ÿ": 5}, merges=[]))  # all in the alphabet
    plain.decoder = decoders.ByteLevel()
    read, alone = Vocabulary.from_tokenizer(together), Vocabulary.from_tokenizer(plain)
    assert [read.token_bytes(token_id) for token_id in (0, 1, 4, 5)] == [b" a", b"\xe9\n", b"", b"\xff"]
    assert [alone.token_bytes(token_id) for token_id in (0, 1, 4, 5)] == [b" a", b"\xe9\n", b"", b"\xff"]
    assert [read.token_bytes(token_id) for token_id in (2, 3)] == [b"b c", "Ġ d".encode()]


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), None])
def test_a_decoder_without_exact_bytes_is_refused(decoder: Any) -> None:
    backend = Tokenizer(models.WordPiece(vocab={"a": 0, "##b": 1}, unk_token="a"))  # noqa: S106 - a vocabulary's word
    if decoder is not None:
        backend.decoder = decoder
    name = json.loads(decoder.__getstate__())["type"] if decoder else "none"
    with pytest.raises(UnsupportedModelError, match=name):
        Vocabulary.from_tokenizer(backend)
