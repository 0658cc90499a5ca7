from __future__ import annotations

import random
import re
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from logprobe import LLM, SamplingParams
from logprobe.errors import UnsupportedModelError
from logprobe.models import load_tokenizer
from logprobe.models.gguf.file import GgufFile
from logprobe.models.gguf.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.models import ModelFiles

WRITTEN = [
    "",
    " ",
    "the thing, then\n\n\n the abab 1234 12345 x9  y10",
    "for i in range(3):\n    3 + 4\n   7  8   99",
    "\t\tdef f(a, b):\r\n\r\n        return a ** b  # !!!\r\n",
    "   7  8   99",
    "It's WE'LL they'd I'm you've 'tis don'T",
    "深度学习模型的概率，１２３ 一二三",  # noqa: RUF001 - such text is the point
    "日本語のテキスト 한국어 문장 العربية ٠١٢٣ हिन्दी १२३",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 é́ ñ Å ﬁ ½ Ⅷ ²",
    "a\u00a0b\u2003c\u3000d\u200be\u2028f\u0085g\x0bh\x0ci",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_start",
    "<bos><start_of_turn>user\n<table><tr>x</tr></table><eos> <b>bold</b>",
    "<|end|><|user|>x <tag> y<tag><|en",
    "▁marked▁ ▁▁ words ▁",
    " " * 70 + "x" + "\n" * 40 + "y" + "\t" * 33,
    "aaaaaaaaaaaaaaa abababababab hahahahaha",
    "<0x0A> <0xE2> <unk> <s>",
]
POOLS: list[Callable[[random.Random], str]] = [
    lambda rng: chr(rng.randrange(32, 127)),
    lambda rng: rng.choice(" \n\t\r  "),
    lambda rng: chr(rng.randrange(0x4E00, 0x9FFF)),
    lambda rng: chr(rng.randrange(0x1F300, 0x1F700)),
    lambda rng: chr(rng.randrange(0x300, 0x370)),
    lambda rng: rng.choice("0123456789"),
    lambda rng: rng.choice(
        ["<|im_end|>", "<eos>", "<td>", "<tag>", "\n\n", "the", "ing", " of", "'s", "'LL", "aba"]
    ),
    lambda rng: chr(rng.randrange(0xA0, 0x2FFF)),
    lambda rng: rng.choice("\u2003\u00a0\u3000\u0085\u200b\u2028\ufe0f\u200d٣Ⅷ½𝟙"),  # noqa: RUF001 - likewise
]


def corpus(num_random: int) -> list[str]:
    rng = random.Random(5)  # noqa: S311 - a corpus, no secret
    texts = [*WRITTEN, Path(__file__).read_text(encoding="utf-8")[:6000]]
    for _ in range(num_random):
        weights = [rng.random() ** 3 for _ in POOLS]
        texts.append("".join(pool(rng) for pool in rng.choices(POOLS, weights, k=rng.randrange(1, 80))))
    return texts


@pytest.mark.real_model
@pytest.mark.parametrize(("real_files", "real_gguf"), [("smollm2",) * 2, ("gemma3-270m",) * 2], indirect=True)
def test_real_tokens_are_those_of_llama_cpp_and_of_autotokenizer(
    real_files: ModelFiles, real_gguf: Path, llama_cpp: Callable[[Path], Any]
) -> None:
    tokenizer = load_tokenizer(real_files)
    automatic = AutoTokenizer.from_pretrained(real_files.folder)
    reference = llama_cpp(real_gguf)
    for text in corpus(200):
        expected = reference.encode(text)
        assert tokenizer.encode(text) == expected, text
        assert automatic.encode(text, add_special_tokens=False) == expected, text
    with_special = reference.encode("Hello there", add_special_tokens=True)
    assert tokenizer.encode("Hello there", add_special_tokens=True) == with_special
    assert automatic.encode("Hello there") == with_special


@pytest.mark.real_model
@pytest.mark.parametrize("real_files", ["smollm2"], indirect=True)
def test_smollm2_splits_every_digit_off(real_files: ModelFiles) -> None:
    tokenizer = load_tokenizer(real_files)
    assert len(tokenizer.encode("   7  8   99")) == 7
    assert len(tokenizer.encode("for i in range(3):\n    3 + 4\n   7  8   99")) == 19


@pytest.mark.real_model
@pytest.mark.parametrize("real_files", ["smollm2"], indirect=True)
def test_smollm2_keeps_its_chat_template(real_files: ModelFiles) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = load_tokenizer(real_files).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def built(gguf: GgufFile) -> Any:
    """The tokenizer that is written next to the file, as transformers loads it."""
    write_tokenizer(gguf, gguf.path.parent)
    return PreTrainedTokenizerFast.from_pretrained(gguf.path.parent, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("rule", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_each_splitting_rule_gives_the_tokens_of_llama_cpp(
    rule: str, tmp_path: Path, write_gguf: Callable[..., Path], llama_cpp: Callable[[Path], Any]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", rule=rule)
    tokenizer, reference = built(GgufFile(path)), llama_cpp(path)
    for text in corpus(100):
        # Qwen's own tokenizer composes characters first, which llama.cpp leaves out.
        given_text = unicodedata.normalize("NFC", text) if rule == "qwen2" else text
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(given_text), text
    assert tokenizer.encode("the") == reference.encode("the", add_special_tokens=True)


@pytest.mark.parametrize("has_prefix", [False, True])
def test_sentencepiece_gives_the_tokens_of_llama_cpp(
    has_prefix: bool, tmp_path: Path, write_gguf: Callable[..., Path], llama_cpp: Callable[[Path], Any]
) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf",
        kind="llama",
        rule="default",
        more=lambda writer: writer.add_add_space_prefix(has_prefix),
    )
    tokenizer, reference = built(GgufFile(path)), llama_cpp(path)
    for text in corpus(100):
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text), text
    assert tokenizer.encode("the") == reference.encode("the", add_special_tokens=True)


@pytest.mark.parametrize("has_prefix", [False, True])
def test_grammars_are_followed_on_a_sentencepiece_file(
    has_prefix: bool, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf",
        kind="llama",
        rule="default",
        more=lambda writer: writer.add_add_space_prefix(has_prefix),
    )
    schema = {"type": "object", "properties": {"a": {"enum": ["the", " x"]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    forms: list[tuple[dict[str, Any], str]] = [
        ({"type": "choice", "choice": ["the ab <tag> é", "a row"]}, "the ab <tag> é|a row"),
        ({"type": "regex", "regex": "the model of [ab]"}, "the model of [ab]"),
        ({"type": "ebnf", "ebnf": 'start: "the" " model" ("a" | "b")'}, "the model(a|b)"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, r'\{"a": "(the| x)"\}'),
        ({"type": "json_object"}, r"\{.*"),
    ]
    with LLM(str(path), kv_cache_memory_bytes=1 << 22) as llm:
        for form, pattern in forms:
            params = SamplingParams(response_format=form, max_tokens=60, n=2, seed=3)
            for output in llm.generate(["the row"], params)[0].outputs:
                assert re.fullmatch(pattern, output.text)
                assert output.finish_reason == "stop" or form["type"] == "json_object"


@pytest.mark.parametrize(("rule", "theirs"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_a_rule_equals_transformers_tokenizer_of_that_name(
    rule: str, theirs: Any, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    gguf = GgufFile(write_gguf(tmp_path / "tiny.gguf", rule=rule))
    ours = built(gguf)
    merges = [tuple(merge.split(" ")) for merge in gguf.value("tokenizer.ggml.merges")]
    vocabulary = {token: token_id for token_id, token in enumerate(gguf.value("tokenizer.ggml.tokens"))}
    end = "<|end|>"
    reference = theirs(
        vocab=vocabulary, merges=merges, unk_token=end, bos_token=end, eos_token=end, pad_token=end
    )
    texts = [text for text in corpus(150) if "<|" not in text and "<tag" not in text]
    assert len(texts) > 50
    for text in texts:
        encoded = reference.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == encoded, text


@settings(deadline=None, max_examples=50)
@given(st.text())
def test_bytes_come_back_from_decoding(tiny_byte_level: Any, text: str) -> None:
    token_ids = tiny_byte_level.encode(text, add_special_tokens=False)
    assert tiny_byte_level.decode(token_ids) == text


@pytest.fixture(scope="session")
def tiny_byte_level(tmp_path_factory: pytest.TempPathFactory, write_gguf: Callable[..., Path]) -> Any:
    return built(GgufFile(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")))


def test_an_unknown_rule_is_refused_by_name(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    gguf = GgufFile(write_gguf(tmp_path / "tiny.gguf", rule="tekken"))
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'tekken'"):
        built(gguf)


def test_an_unknown_kind_of_vocabulary_is_refused_by_name(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    gguf = GgufFile(write_gguf(tmp_path / "tiny.gguf", kind="bert"))
    with pytest.raises(UnsupportedModelError, match="tokenizer model 'bert'"):
        built(gguf)


def test_bos_and_eos_are_added_only_where_the_file_and_the_call_ask(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    def ask(writer: Any) -> None:
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)

    tokenizer = built(GgufFile(write_gguf(tmp_path / "tiny.gguf", more=ask)))
    bare = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the", add_special_tokens=True) == [1, *bare, 0]
