"""Random Llamas on a GPU, their float64 reference, and texts through the decoder under test."""

from __future__ import annotations

import gc
import math
import time
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    Ids = np.ndarray[Any, np.dtype[np.int64]]

# The sizes of Llama 3.2 1B and Llama 3.1 8B, and one for a CPU.
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}
CONTEXT_LEN = 8192
ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
STD = 0.02
NUM_OUTLIERS = 4  # hidden channels that every norm makes 30 to 100 times as large as the others
OUTLIER_WEIGHT = 0.125  # of what reads them, against other weights: they would else be all that counts
LAST_NORM = 2.5  # makes logits spread over some nats


def random_model(shape: str, device: str, seed: int = 0, *, has_outliers: bool = True) -> Any:
    """A transformers Llama in bfloat16 whose weights are drawn on the device.

    A few of its channels are outliers, as in trained models; without, roundings of bfloat16 grow less over
    many layers.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=CONTEXT_LEN,
        rope_parameters=ROPE,
        bos_token_id=0,
        eos_token_id=1,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    module = module.to(torch.bfloat16).to_empty(device=device)
    module.tie_weights()
    rotary = module.model.rotary_emb
    module.model.rotary_emb = type(rotary)(config).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    outliers = torch.arange(1, NUM_OUTLIERS + 1) * (config.hidden_size // (NUM_OUTLIERS + 1))
    outliers = outliers.to(device)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5, generator=generator)
                if has_outliers:
                    exponents = torch.empty(NUM_OUTLIERS, device=device)
                    exponents.uniform_(1.5, 2, generator=generator)
                    weight[outliers] = (10**exponents).to(weight.dtype)
            else:
                weight.normal_(0, STD, generator=generator)
                if has_outliers and "o_proj" not in name and "down_proj" not in name:
                    weight[:, outliers] *= OUTLIER_WEIGHT
        module.model.norm.weight *= LAST_NORM
    return module.eval().requires_grad_(requires_grad=False)


def weight_bytes(module: Any) -> int:
    """Bytes of weights that a decode step reads: all but the embedding of an untied model, in their dtype."""
    tied = module.config.tie_word_embeddings
    embedding = 0 if tied else module.get_input_embeddings().weight.nbytes
    return sum(weight.nbytes for weight in module.parameters()) - embedding


def num_layer_weights(module: Any) -> int:
    """Weights that a prompt's token is multiplied with, but for the head's."""
    return sum(weight.numel() for weight in module.model.layers.parameters() if weight.dim() == 2)


def kv_numbers(module: Any) -> int:
    """Numbers of keys and values of a token."""
    config = module.config
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim)


@torch.inference_mode()
def reference_logprobs(module: Any, token_ids: Ids) -> torch.Tensor:
    """Log-probabilities after each token of a text in float64, (num_tokens, vocabulary), nats.

    Rotary angles are those of transformers, which are float32 by definition (see `precision.py`).
    """
    config, device = module.config, module.lm_head.weight.device
    ids = torch.as_tensor(token_ids, device=device)
    num, head_dim = len(ids), config.head_dim
    x = module.model.embed_tokens.weight[ids].double()
    positions = torch.arange(num, device=device)[None]
    cos, sin = (part[0].double() for part in module.model.rotary_emb(x.float()[None], positions))
    mask = torch.ones(num, num, dtype=torch.bool, device=device).tril()
    group = config.num_attention_heads // config.num_key_value_heads

    def normed(norm: Any, rows: torch.Tensor) -> torch.Tensor:
        scale = (rows.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return rows * scale * norm.weight.double()

    def rotated(rows: torch.Tensor) -> torch.Tensor:
        first, second = rows.chunk(2, dim=-1)
        return rows * cos + torch.cat((-second, first), dim=-1) * sin

    for layer in module.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        rows = normed(layer.input_layernorm, x)
        query, key, value = (
            (rows @ part.weight.double().T).view(num, -1, head_dim).transpose(0, 1)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        key, value = (part.repeat_interleave(group, dim=0) for part in (rotated(key), value))
        scores = rotated(query) @ key.transpose(1, 2) / math.sqrt(head_dim)
        attended = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value
        x = x + attended.transpose(0, 1).reshape(num, -1) @ attention.o_proj.weight.double().T
        rows = normed(layer.post_attention_layernorm, x)
        gate = torch.nn.functional.silu(rows @ mlp.gate_proj.weight.double().T)
        x = x + (gate * (rows @ mlp.up_proj.weight.double().T)) @ mlp.down_proj.weight.double().T
    return (normed(module.model.norm, x) @ module.lm_head.weight.double().T).log_softmax(-1)


class Ours:
    """Texts through the decoder under test; text number i owns row i of `slots`."""

    def __init__(
        self, module: Any, num_texts: int, text_len: int, arithmetic: str = "bf16x3", seed: int | None = None
    ) -> None:
        """`seed` scatters the slots over the pool; None: one text after the other."""
        from logprobe.engine.forward.torch.cuda.build import cuda_decoder
        from logprobe.engine.forward.torch.cuda.plan import SpanPlan
        from logprobe.engine.forward.torch.transformers_proof import TransformersProof
        from logprobe.models.lazy import LazyModel

        with torch.inference_mode():
            model = LazyModel.of(module)
            # Random weights in bfloat16 arithmetic are far from the reference; `accuracy` tells how far.
            decoder = cuda_decoder(
                model,
                TransformersProof(model),
                device=str(module.device),
                arithmetic=arithmetic,
                tolerance=0.5,
            )
        assert not isinstance(decoder, str), decoder
        self.decoder = decoder
        module.set_attn_implementation("sdpa")  # in the place of the comparison's
        self.device = module.lm_head.weight.device
        self.pool = self.decoder.new_pool(num_texts * text_len)
        self.decoder.record_on(self.pool, text_len)
        slots = np.arange(num_texts * text_len)
        if seed is not None:
            slots = np.random.default_rng(seed).permutation(slots)
        self.slots = slots.astype(np.int32).reshape(num_texts, text_len)
        self._plan_of = SpanPlan

    def fill_pool(self) -> None:
        """Random keys and values, so that timed contexts hold what a real one may."""
        for parts in (self.pool.keys, self.pool.values):
            for tensor in parts.values() if isinstance(parts, dict) else parts:
                tensor.normal_()

    def plan(self, spans: Sequence[tuple[int, int, int]]) -> Any:
        """The plan of a step of spans (text, start, end)."""
        contexts = [self.slots[text, :end] for text, _, end in spans]
        return self._plan_of(self.pool, contexts, [end - start for _, start, end in spans], self.device)

    def run(self, spans: Sequence[tuple[int, int, int]], texts: Sequence[Ids]) -> torch.Tensor:
        """Run tokens [start, end) of texts in one step; their last hidden states, (num_tokens, hidden)."""
        ids = np.concatenate([texts[text][start:end] for text, start, end in spans]).astype(np.int64)
        positions = np.concatenate([np.arange(start, end, dtype=np.int64) for _, start, end in spans])
        return self.step(ids, positions, self.plan(spans)).clone()  # the next step may write there

    @torch.inference_mode()
    def step(self, ids: Ids, positions: Ids, plan: Any) -> torch.Tensor:
        """The same of ids and positions, good until the next step."""
        hidden: torch.Tensor = self.decoder(ids, positions, plan)
        return hidden

    def products(self) -> dict[str, list[Any]]:
        """The products of each kind, of all layers."""
        layers = self.decoder.layers
        return {
            "qkv": [layer.projection for layer in layers],
            "o": [layer.output for layer in layers],
            "gate_up": [layer.mlp.inner for layer in layers],
            "down": [layer.mlp.down for layer in layers],
            "head": [self.decoder.lm_head],
        }

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states, (rows, vocabulary) float32."""
        return self.decoder.head(hidden).clone()

    def prefill(self, texts: Sequence[Ids], lengths: Sequence[int], chunk: int) -> None:
        """Run the first tokens of texts, in steps of at most `chunk` tokens."""
        spans: list[tuple[int, int, int]] = []
        room = chunk
        for text, length in enumerate(lengths):
            start = 0
            while start < length:
                end = min(length, start + room)
                spans.append((text, start, end))
                room -= end - start
                start = end
                if not room:
                    self.run(spans, texts)
                    spans, room = [], chunk
        if spans:
            self.run(spans, texts)


def random_texts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[Ids]:
    """Texts of random ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocab_size, length) for length in lengths]


def save_model(module: Any, folder: Path) -> None:
    """Write a model with a byte-level tokenizer of as many tokens as it has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<|bos|>", "<|eos|>", *alphabet]
    pieces += [
        f"{alphabet[number % 256]}{number}" for number in range(module.config.vocab_size - len(pieces))
    ]
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": pieces[0], "eos_token": pieces[1]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)
    module.save_pretrained(folder)


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def median_ms(work: Callable[[int], Any], device: str, repeats: int, warm_up: int = 3) -> float:
    """Milliseconds of a call of `work(number)`: the median of some, by events of the GPU's stream.

    What the host takes between its launches counts, too: the stream is idle then.
    """
    for number in range(warm_up if device == "cuda" else 1):
        work(number)
    synchronize(device)
    if device != "cuda":
        times = []
        for number in range(repeats):
            started = time.perf_counter()
            work(number)
            times.append(1e3 * (time.perf_counter() - started))
        return float(np.median(times))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for number in range(repeats):
        work(number)
        events[number + 1].record()
    torch.cuda.synchronize()
    return float(np.median([before.elapsed_time(after) for before, after in pairwise(events)]))


def wall_seconds(work: Callable[[], Any], device: str) -> float:
    """Seconds of one call."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


@contextmanager
def tf32(*, allowed: bool) -> Iterator[None]:
    """Let float32 products round their inputs to TF32, or not."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def free_memory(device: str) -> None:
    """Give the device what nobody holds any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
