"""Make a model of real size of random weights: a folder of bfloat16 safetensors, and the same as GGUF files.

`make_model.py llama-1b FOLDER` writes FOLDER/llama-1b and, for each mix of `--gguf`, a file beside it, like
FOLDER/llama-1b-q8_0.gguf; what is there is kept. The shapes are those of Llama 3.2 1B and of Llama 3.1 8B.
The tokenizer is the default model's: no text has token ids above its own. A seed gives the same bytes
everywhere, and memory holds one tensor at most. The blocks of a GGUF file are made by llama.cpp's own code.
"""

import argparse
import contextlib
import ctypes
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Form
from gguf import LlamaFileType, TokenType
from rich.console import Console
from rich.progress import Progress
from safetensors import safe_open

from logprobe.models import resolve
from logprobe.models.known import DEFAULT_MODEL

SEED = 20_261_125
VOCABULARY_LEN = 128_256
CONTEXT_LEN = 131_072
ROPE_THETA = 500_000.0
NORM_EPSILON = 1e-5
SHARD_BYTES = 2_000_000_000
CHUNK = 1 << 23  # weights that a thread makes, or turns into blocks, at once
THREADS = 2
# A linear layer keeps the scale of what comes in, and logits spread about as far as a real model's; the
# layers add so much to a tied embedding that its own token does not win.
HEAD_SPREAD = 2.5
NORM_SPREAD = 0.1
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SPLITTING_RULE = "smollm"  # the default model's
BFLOAT16_BYTES = 2
ALIGNMENT_BYTES = 8  # of a safetensors header

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What tells one Llama from another."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    is_tied: bool
    rope_factor: float

    def config(self) -> dict[str, Any]:
        """Its config.json, less the special tokens."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.feed_forward,
            "vocab_size": VOCABULARY_LEN,
            "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": CONTEXT_LEN,
            "rms_norm_eps": NORM_EPSILON,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "use_cache": True,
            "rope_theta": ROPE_THETA,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": self.rope_factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights by their names, in the order of the files."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        of_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.feed_forward, self.hidden),
            "mlp.up_proj": (self.feed_forward, self.hidden),
            "mlp.down_proj": (self.hidden, self.feed_forward),
        }
        named = {
            f"model.layers.{layer}.{name}.weight": shape
            for layer in range(self.layers)
            for name, shape in of_layer.items()
        }
        table = (VOCABULARY_LEN, self.hidden)
        head = {} if self.is_tied else {"lm_head.weight": table}
        return {"model.embed_tokens.weight": table, **named, "model.norm.weight": (self.hidden,), **head}


SHAPES = {
    "llama-1b": Shape(
        hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, feed_forward=8192,
        is_tied=True, rope_factor=32.0,
    ),
    "llama-8b": Shape(
        hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, feed_forward=14_336,
        is_tied=False, rope_factor=8.0,
    ),
}  # fmt: skip
MIXES = {
    "bf16": (Form.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (Form.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_k_m": (Form.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
}


@contextlib.contextmanager
def progress(what: str, num_tensors: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr; what is handed out is called after each tensor."""
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=num_tensors)
        yield lambda: bar.advance(task)


def chunks(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Ranges of rows of a tensor, each small."""
    width = shape[-1] if len(shape) > 1 else 1
    step = max(1, CHUNK // width)
    return [(at, min(at + step, shape[0])) for at in range(0, shape[0], step)]


def as_bfloat16(values: Array) -> Array:
    """Float32, rounded to the nearest, a tie to the even one; the bits as uint16."""
    bits = values.view(np.uint32)
    rounded: Array = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)


def as_float32(bits: Array) -> Array:
    """The same numbers as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def random_rows(name: str, shape: tuple[int, ...], seed: list[int], rows: tuple[int, int]) -> Array:
    """Bits of bfloat16 weights of some rows."""
    values = np.random.default_rng([*seed, rows[0]]).standard_normal(
        (rows[1] - rows[0], *shape[1:]), dtype=np.float32
    )
    if len(shape) == 1:
        return as_bfloat16(np.float32(1.0) + np.float32(NORM_SPREAD) * values)
    is_table = name in ("model.embed_tokens.weight", "lm_head.weight")
    spread = (HEAD_SPREAD if is_table else 1.0) / shape[1] ** 0.5
    return as_bfloat16(np.float32(spread) * values)


def num_bytes(shape: tuple[int, ...]) -> int:
    """Size of a tensor in bfloat16."""
    return BFLOAT16_BYTES * int(np.prod(shape))


def shards(tensors: dict[str, tuple[int, ...]]) -> list[list[str]]:
    """Names of the tensors of each file, none of which is larger than SHARD_BYTES."""
    files: list[list[str]] = [[]]
    size = 0
    for name, shape in tensors.items():
        if files[-1] and size + num_bytes(shape) > SHARD_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += num_bytes(shape)
    return files


def header(tensors: dict[str, tuple[int, ...]]) -> bytes:
    """What stands before the data of a safetensors file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + num_bytes(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(ALIGNMENT_BYTES, "little") + text


def write_weights(shape: Shape, folder: Path, seed: int) -> None:
    """Write the shards and their index."""
    tensors = shape.tensors()
    numbers = {name: number for number, name in enumerate(tensors)}
    files = shards(tensors)
    where: dict[str, str] = {}
    with ThreadPoolExecutor(THREADS) as pool, progress(folder.stem, len(tensors)) as advance:
        for number, held in enumerate(files):
            file_name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
            with (folder / file_name).open("wb") as out:
                out.write(header({name: tensors[name] for name in held}))
                for name in held:
                    make = partial(random_rows, name, tensors[name], [seed, numbers[name]])
                    for part in pool.map(make, chunks(tensors[name])):
                        out.write(part.data)
                    advance()
            where |= dict.fromkeys(held, file_name)
    index = {"metadata": {"total_size": sum(map(num_bytes, tensors.values()))}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def published_folder() -> Path:
    """Where the default model's tokenizer is."""
    return resolve(DEFAULT_MODEL).folder


def make_folder(shape: Shape, folder: Path, seed: int = SEED) -> None:
    """Write config, weights and tokenizer; the folder appears only once it is whole."""
    partial_folder = folder.with_suffix(".partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    published = published_folder()
    for name in TOKENIZER_FILES:
        shutil.copyfile(published / name, partial_folder / name)
    special = {
        key: value for key, value in read_json(published / "config.json").items() if key.endswith("_token_id")
    }
    (partial_folder / "config.json").write_text(json.dumps(shape.config() | special, indent=2) + "\n")
    write_weights(shape, partial_folder, seed)
    partial_folder.rename(folder)


def read_json(path: Path) -> Any:
    """A file's content."""
    return json.loads(path.read_text(encoding="utf-8"))


def has_more_bits(number: int, count: int) -> bool:
    """Whether a layer is one of those to which Q4_K_M gives 6 bits: llama.cpp's `use_more_bits`.

    They are the first and the last eighth of the layers, and each third between.
    """
    eighth = count // 8
    return number < eighth or number >= 7 * count // 8 or (number - eighth) % 3 == 2


def form_of(name: str, mix: str, config: dict[str, Any]) -> Form:
    """In which form llama.cpp's own quantiser writes a tensor of a Llama, of a GGUF file's name."""
    if name.endswith("norm.weight"):
        return Form.F32
    if mix != "q4_k_m":
        return MIXES[mix][0]
    if name == ("token_embd.weight" if config["tie_word_embeddings"] else "output.weight"):
        return Form.Q6_K
    is_generous = name.endswith(("attn_v.weight", "ffn_down.weight")) and has_more_bits(
        int(name.split(".")[1]), config["num_hidden_layers"]
    )
    return Form.Q6_K if is_generous else Form.Q4_K


@cache
def own_quantiser() -> Any:
    """llama.cpp's `ggml_quantize_chunk`, from the library beside xllamacpp's extension."""
    import xllamacpp.xllamacpp

    call = ctypes.CDLL(xllamacpp.xllamacpp.__file__).ggml_quantize_chunk
    call.restype = ctypes.c_size_t
    call.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return call


def in_form(bits: Array, form: Form) -> Array:
    """Rows of bfloat16 bits in a form of a GGUF file, as bytes."""
    if form == Form.BF16:
        return bits.view(np.uint8)
    values = as_float32(bits)
    if form == Form.F32:
        return values.view(np.uint8)
    num_rows, width = values.shape
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[form]
    out = np.empty((num_rows, width // block_len * block_bytes), np.uint8)
    written = own_quantiser()(int(form), values.ctypes.data, out.ctypes.data, 0, num_rows, width, None)
    assert written == out.nbytes
    return out


def pairs_together(bits: Array, heads: int) -> Array:
    """Bring rotary rows into llama.cpp's order: those that turn together stand beside each other."""
    halves = bits.reshape(heads, 2, bits.shape[0] // heads // 2, *bits.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(bits.shape))


def stored_bits(folder: Path) -> Iterator[tuple[str, Array]]:
    """Every tensor of a folder by its name, as bits of bfloat16 that are read when used."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name).view(torch.int16).numpy().view(np.uint16)


def write_gguf(folder: Path, target: Path, mix: str) -> dict[str, int]:
    """Write a folder's weights as a GGUF file of a mix of forms; how many tensors have each form."""
    config = read_json(folder / "config.json")
    renamed = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    partial_file = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial_file, "llama")
    add_metadata(writer, config, folder / "tokenizer.json", MIXES[mix][1])
    factors = rope_factors(config)
    writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    forms: list[Form] = []
    for name, bits in stored_bits(folder):
        own_name = str(renamed.get_name(name, try_suffixes=(".weight",)))
        form = form_of(own_name, mix, config)
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[form]
        size = bits.size // block_len * block_bytes
        writer.add_tensor_info(own_name, bits.shape, np.dtype(np.float32), size, raw_dtype=form)
        forms.append(form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.write_tensor_data(factors)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    with ThreadPoolExecutor(THREADS) as pool, progress(target.stem, len(forms)) as advance:
        for (name, bits), form in zip(stored_bits(folder), forms, strict=True):
            count = heads.get(name.split(".")[-2])
            rows = pairs_together(bits, count) if count else bits
            parts = pool.map(
                lambda ends, rows=rows, form=form: in_form(rows[slice(*ends)], form), chunks(rows.shape)
            )
            writer.write_tensor_data(np.concatenate([part.reshape(-1) for part in parts]))
            advance()
    writer.close()
    partial_file.rename(target)
    return {form.name: count for form, count in Counter(forms).items()}


def rope_factors(config: dict[str, Any]) -> Array:
    """What Llama 3's frequencies are divided by, as llama.cpp's converter writes it."""
    rope, size = config["rope_scaling"], config["head_dim"] // 2
    waves = 2 * np.pi * config["rope_theta"] ** (np.arange(size) / size)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / rope["factor"] + smooth), np.float32)


def add_metadata(writer: Any, config: dict[str, Any], tokenizer: Path, file_type: LlamaFileType) -> None:
    """What a GGUF file of a Llama says of its shape and of its tokenizer."""
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    read = read_json(tokenizer)
    vocabulary = read["model"]["vocab"] | {token["content"]: token["id"] for token in read["added_tokens"]}
    tokens = [f"[PAD{token_id}]" for token_id in range(config["vocab_size"])]
    types = [TokenType.UNUSED] * len(tokens)
    special = {token["content"] for token in read["added_tokens"] if token["special"]}
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
        types[token_id] = TokenType.CONTROL if token in special else TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(SPLITTING_RULE)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in read["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)


def make_model(name: str, root: Path, mixes: Sequence[str] = (), seed: int = SEED) -> dict[str, Path]:
    """Make what is not there yet of a shape; where its folder is, as "folder", and each mix's GGUF file."""
    paths = {"folder": root / name} | {mix: root / f"{name}-{mix}.gguf" for mix in mixes}
    if not paths["folder"].exists():
        make_folder(SHAPES[name], paths["folder"], seed)
    for mix in mixes:
        if not paths[mix].exists():
            told = write_gguf(paths["folder"], paths[mix], mix)
            print(
                f"{paths[mix].name}: " + ", ".join(f"{count} {form}" for form, count in told.items()),
                file=sys.stderr,
            )
    return paths


def main() -> None:
    """Make the named shape below a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", nargs="*", default=[], choices=MIXES, help="mixes to write GGUF files of")
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    make_model(given.shape, given.folder, given.gguf, given.seed)


if __name__ == "__main__":
    main()
