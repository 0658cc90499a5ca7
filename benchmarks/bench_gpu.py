"""Measure the GPU decoder and the engine around it on one card: `make gpu`.

Sections run one after the other in a process of their own, which is started again without a section that
crashed it or hung. Results are in a JSON file after each measurement, so that a run that is stopped loses
nothing:

    python benchmarks/bench_gpu.py --out benchmarks/results/gpu.json
    python benchmarks/bench_gpu.py --only accuracy,bits --out accuracy.json
    python benchmarks/bench_gpu.py --out accuracy.json --page docs/dev/gpu.md  # writes its tables there

Models have random bfloat16 weights, made on the card. The exit status is 1 if a section failed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpu_models import (
    Ours,
    free_memory,
    kv_numbers,
    median_ms,
    num_layer_weights,
    random_model,
    random_texts,
    reference_logprobs,
    save_model,
    synchronize,
    tf32,
    wall_seconds,
    weight_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SECONDS = 205.0
GRACE_S = 20.0  # a section that outlasts its budget by more is killed
START_S = 60.0  # for the process that measures to start
TOP = 20
CRASHED = 3  # exit status: the GPU answers no more in this process
BEGIN, END = "<!-- figures: benchmarks/bench_gpu.py --page -->", "<!-- end of figures -->"

Row = dict[str, Any]


class OutOfTimeError(Exception):
    """The budget of a section is used up."""


@dataclass(kw_only=True)
class Sizes:
    """Sizes of the measurements."""

    models: tuple[str, ...] = ("1B", "8B")
    accuracy: tuple[int, int] = (4, 512)  # texts, tokens of each
    decode_rows: tuple[int, ...] = (1, 32, 128)
    context: int = 512
    chunk: int = 2048
    bits_rows: tuple[int, ...] = (1, 2, 8, 32, 64, 128)
    bits_lengths: tuple[int, int] = (40, 300)
    drawn: tuple[int, int, int] = (32, 128, 64)  # texts, tokens drawn of each, tokens of the longest prompt
    extract_rows: tuple[int, ...] = (1, 32, 128, 2048)
    extract_ks: tuple[int, ...] = (0, 20, 1000)
    vocab_size: int = 128_256
    requests: tuple[int, ...] = (1, 32, 128)
    request_len: tuple[int, int] = (16, 128)  # tokens of a prompt, tokens drawn
    logprobs: tuple[int | None, ...] = (None, 0, 20, 1000)
    scored: tuple[int, int] = (32, 512)  # texts, tokens of each
    copied_bytes: int = 64 << 20
    repeats: int = 20
    floor_bytes: int = 4 << 30
    matmul: int = 8192

    @classmethod
    def small(cls) -> Sizes:
        """A few seconds on a CPU, through Triton's interpreter."""
        return cls(
            models=("tiny",),
            accuracy=(2, 8),
            decode_rows=(2,),
            context=4,
            chunk=4,
            bits_rows=(3,),
            bits_lengths=(3, 8),
            drawn=(2, 2, 8),
            extract_rows=(3,),
            extract_ks=(0, 5),
            vocab_size=500,
            requests=(2,),
            request_len=(4, 2),
            logprobs=(None, 5),
            scored=(2, 4),
            copied_bytes=1 << 16,
            repeats=1,
            floor_bytes=1 << 22,
            matmul=64,
        )


@dataclass(kw_only=True)
class Results:
    """The JSON file of a run, written whole after each change."""

    path: Path
    content: dict[str, Any] = field(default_factory=dict)

    def write(self) -> None:
        """Replace the file."""
        partial_file = self.path.with_name(f"{self.path.name}.partial")
        partial_file.parent.mkdir(parents=True, exist_ok=True)
        partial_file.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        partial_file.replace(self.path)

    def read(self) -> None:
        """Take in what another process wrote."""
        self.content = json.loads(self.path.read_text(encoding="utf-8"))

    @property
    def sections(self) -> dict[str, Any]:
        """Section → its rows, seconds, and error or what was left out."""
        found: dict[str, Any] = self.content["sections"]
        return found


@dataclass(kw_only=True)
class Run:
    """Settings of a section, and the results that it adds rows to."""

    results: Results
    sizes: Sizes
    device: str
    section: str = ""
    deadline: float = 0.0  # of the section, seconds since the epoch

    def add(self, figure: str, **cells: Any) -> None:
        """Keep a measurement and print it."""
        row = {"figure": figure} | {name: _plain(value) for name, value in cells.items()}
        self.results.sections[self.section]["rows"].append(row)
        self.results.write()
        print("  " + "  ".join(f"{name} {_shown(value)}" for name, value in row.items()), flush=True)

    def check(self) -> None:
        """Stop the section where its time is up."""
        if time.time() > self.deadline:
            raise OutOfTimeError

    @cached_property
    def floors(self) -> dict[str, float]:
        """The card's speeds, by `machine`, or measured now where that section did not run."""
        rows = self.results.sections.get("machine", {}).get("rows", [])
        found = {row["figure"]: row["value"] for row in rows if "value" in row}
        return found if found.keys() >= FLOORS else dict(_floors(self))

    @property
    def bandwidth(self) -> float:
        """Bytes a second that the card reads at best."""
        return 1e9 * max(self.floors["read_gb_s"], self.floors["copy_gb_s"])


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return value.item() if isinstance(value, np.generic | torch.Tensor) else value


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


# The card

FLOORS = {"copy_gb_s", "read_gb_s", "matmul_bf16_tflop_s", "d2h_pinned_gb_s"}


def _floors(run: Run) -> Iterator[tuple[str, float]]:
    size, repeats = run.sizes.floor_bytes, run.sizes.repeats
    source = torch.randn(size // 4, device=run.device)
    target = torch.empty_like(source)
    milliseconds = median_ms(lambda _: target.copy_(source), run.device, repeats)
    yield "copy_gb_s", 2 * size / milliseconds / 1e6
    # Sums of several types: torch's kernel for one of them may not be bound by memory.
    times = [
        median_ms(lambda _, dtype=dtype: source.view(dtype).sum(), run.device, repeats)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    yield "read_gb_s", size / min(times) / 1e6
    side = run.sizes.matmul
    left, right = (torch.randn(side, side, device=run.device, dtype=torch.bfloat16) for _ in range(2))
    milliseconds = median_ms(lambda _: left @ right, run.device, repeats)
    yield "matmul_bf16_tflop_s", 2 * side**3 / milliseconds / 1e9
    num_bytes = min(size, 256 << 20)
    host = torch.empty(num_bytes // 4, pin_memory=run.device == "cuda")
    sent = source[: num_bytes // 4]
    milliseconds = median_ms(lambda _: host.copy_(sent, non_blocking=True), run.device, min(repeats, 10))
    yield "d2h_pinned_gb_s", num_bytes / milliseconds / 1e6


def machine(run: Run) -> None:
    """Name the card and its software, and measure its speeds."""
    run.results.content["machine"] = machine_facts(run.device)
    for name, value in run.results.content["machine"].items():
        print(f"  {name}: {value}")
    for name, value in _floors(run):
        run.add(name, value=value)


def machine_facts(device: str) -> dict[str, Any]:
    """The card, the versions and the date."""
    facts: dict[str, Any] = {"date": f"{dt.datetime.now(tz=dt.UTC):%Y-%m-%d %H:%M} UTC", "device": "CPU"}
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        facts["device"] = card.name
        facts["memory_gib"] = round(card.total_memory / 2**30, 1)
        facts["multiprocessors"] = card.multi_processor_count
        facts["cuda"] = torch.version.cuda
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
            facts["driver"] = told.stdout.strip()
        except (OSError, subprocess.SubprocessError) as error:
            facts["driver"] = f"unknown ({error})"
    facts["python"] = sys.version.split()[0]
    for name in ("torch", "triton", "transformers"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = None
    return facts


# Numbers


def accuracy(run: Run) -> None:
    """Compare log-probabilities with float64: ours in both arithmetics, and transformers in three."""
    module = random_model(run.sizes.models[0], run.device)
    num_texts, length = run.sizes.accuracy
    texts = random_texts([length] * num_texts, module.config.vocab_size)
    wanted = [_numbers_of(reference_logprobs(module, text), text) for text in texts]
    logits_std = torch.cat([top[:, 0] - mean for _, top, _, mean in wanted]).mean()
    run.add("the reference", tokens=num_texts * (length - 1), best_above_mean_nats=float(logits_std))

    def compare(name: str, logits_of: Callable[[Any], torch.Tensor], arithmetic: str) -> None:
        chosen, best = [], []
        for text, (own, top, ids, _) in zip(texts, wanted, strict=True):
            rows = logits_of(text).double().log_softmax(-1)
            chosen.append((_chosen(rows, text) - own).abs())
            best.append((rows.gather(1, ids) - top).abs())
        run.add(
            name,
            arithmetic=arithmetic,
            chosen_max_nats=float(torch.cat(chosen).max()),
            chosen_mean_nats=float(torch.cat(chosen).mean()),
            top20_max_nats=float(torch.cat(best).max()),
            top20_mean_nats=float(torch.cat(best).mean()),
        )

    def ours(arithmetic: str) -> Callable[[Any], torch.Tensor]:
        engine = Ours(module, 1, length, arithmetic)
        return lambda text: engine.head(engine.run([(0, 0, length)], [text]))

    @torch.inference_mode()
    def theirs(model: Any, text: Any) -> torch.Tensor:
        found: torch.Tensor = model(torch.as_tensor(text, device=run.device)[None], use_cache=False).logits[0]
        return found

    for arithmetic in ("bf16x3", "bf16"):
        compare("logprobe", ours(arithmetic), arithmetic)
        run.check()
    compare("transformers", partial(theirs, module), "bfloat16")
    module = module.float()
    with tf32(allowed=False):
        compare("transformers", partial(theirs, module), "float32")
    with tf32(allowed=True):
        compare("transformers", partial(theirs, module), "float32 with TF32")


def _numbers_of(rows: torch.Tensor, text: Any) -> tuple[torch.Tensor, ...]:
    top = rows.topk(TOP, dim=-1)
    return _chosen(rows, text), top.values, top.indices, rows.mean(-1)


def _chosen(rows: torch.Tensor, text: Any) -> torch.Tensor:
    ids = torch.as_tensor(text[1:], device=rows.device)
    return rows[:-1].gather(1, ids[:, None])[:, 0]


def bits(run: Run) -> None:
    """Count rows whose bits depend on the batch or on how their prompt is cut."""
    module = random_model(run.sizes.models[0], run.device)
    num = max(run.sizes.bits_rows)
    low, high = run.sizes.bits_lengths
    lengths = np.random.default_rng(1).integers(low, high, num).tolist()
    texts = random_texts(lengths, module.config.vocab_size)
    ours = Ours(module, num, max(lengths), seed=0)
    ours.prefill(texts, lengths, run.sizes.chunk)
    last = [(text, length - 1, length) for text, length in enumerate(lengths)]
    alone = torch.cat([ours.run([span], texts) for span in last])
    alone_logits = torch.cat([ours.head(row[None]) for row in alone[: min(num, 32)]])
    for rows in run.sizes.bits_rows:
        hidden = ours.run(last[:rows], texts)
        _add_bits(run, f"a step of {rows}", hidden, alone[:rows])
        known = min(rows, len(alone_logits))
        _add_bits(run, f"logits of {rows}", ours.head(alone[:rows])[:known], alone_logits[:known])
    run.check()
    del alone_logits

    whole = [ours.run([(text, 0, length)], texts) for text, length in enumerate(lengths[:8])]
    _add_bits(
        run, "a whole prompt's last row", torch.stack([rows[-1] for rows in whole]), alone[: len(whole)]
    )
    for name, piece in (("2 pieces", None), ("pieces of 7", 7)):
        found = [_in_pieces(ours, texts, text, piece or -(-lengths[text] // 2)) for text in range(len(whole))]
        _add_bits(run, f"prompts in {name}", torch.cat(found), torch.cat(whole))
    together = ours.run([(text, 0, lengths[text]) for text in range(len(whole))], texts)
    _add_bits(run, f"{len(whole)} prompts in a step", together, torch.cat(whole))
    run.check()
    del ours
    free_memory(run.device)
    _drawn_and_scored(run, module)


def _in_pieces(ours: Ours, texts: Sequence[Any], text: int, piece: int) -> torch.Tensor:
    length = len(texts[text])
    spans = [(text, start, min(start + piece, length)) for start in range(0, length, piece)]
    return torch.cat([ours.run([span], texts) for span in spans])


def _drawn_and_scored(run: Run, module: Any) -> None:
    """Draw greedily step by step, then score the same tokens as prompts in a pool of their own."""
    from logprobe.kernels import extract

    num, new, longest = run.sizes.drawn
    prompt_lens = np.random.default_rng(2).integers(4, longest, num).tolist()
    text_len = max(prompt_lens) + new
    texts = [
        np.concatenate([text, np.zeros(new, np.int64)])
        for text in random_texts(prompt_lens, module.config.vocab_size, seed=3)
    ]
    ours = Ours(module, num, text_len, seed=1)
    ours.prefill(texts, [length - 1 for length in prompt_lens], run.sizes.chunk)
    hidden, logits = [], []
    for number in range(new):
        places = [length - 1 + number for length in prompt_lens]
        rows = ours.run([(text, place, place + 1) for text, place in enumerate(places)], texts)
        hidden.append(rows)
        logits.append(ours.head(rows))
        for text, token_id in enumerate(logits[-1].argmax(-1).tolist()):
            texts[text][places[text] + 1] = token_id
    run.check()
    scored = Ours(module, num, text_len, seed=2)
    rows = []
    spans = [(text, 0, length + new - 1) for text, length in enumerate(prompt_lens)]
    for span in spans:  # each text is cut elsewhere
        cut = 1 + (7 * span[0]) % (span[2] - 1)
        parts = [scored.run([(span[0], start, end)], texts) for start, end in ((0, cut), (cut, span[2]))]
        rows.append(torch.cat(parts)[-new:])
    wanted = torch.stack(hidden, dim=1)  # (num, new, hidden size)
    _add_bits(run, "sampled = scored, hidden states", torch.stack(rows).flatten(0, 1), wanted.flatten(0, 1))
    drawn_logits = torch.stack(logits, dim=1)  # (num, new, vocabulary)
    del logits
    num_rows, differing, largest = 0, 0, 0.0
    for text, own in enumerate(rows):
        chosen = texts[text][prompt_lens[text] : prompt_lens[text] + new]
        numbers = [extract(part, chosen, TOP).logprobs for part in (scored.head(own), drawn_logits[text])]
        differing += int((numbers[0] != numbers[1]).any(-1).sum())
        largest = max(largest, float(abs(numbers[0] - numbers[1]).max()))
        num_rows += new
    run.add("sampled = scored, log-probabilities", rows=num_rows, differing=differing, largest=largest)


def _add_bits(run: Run, name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    differs = (found.view(torch.int32) != wanted.view(torch.int32)).any(-1)
    largest = float((found - wanted).abs().max())
    run.add(name, rows=len(found), differing=int(differs.sum()), largest=largest)


# Speed


def decode(run: Run) -> None:
    """Time decode steps: the decoder, its head and the likeliest token of each row."""
    for shape in run.sizes.models:
        module = random_model(shape, run.device, has_outliers=False)
        steps: dict[int, Row] = {}
        for rows in run.sizes.decode_rows:
            run.check()
            steps[rows] = _our_step(run, module, rows)
            free_memory(run.device)
        for rows, ours in steps.items():
            run.check()
            milliseconds = _their_step_ms(run, module, rows)
            free_memory(run.device)
            floor_ms = 1e3 * weight_bytes(module) / run.bandwidth
            kv_bytes = 4 * rows * run.sizes.context * kv_numbers(module)
            floor_kv_ms = floor_ms + 1e3 * kv_bytes / run.bandwidth
            run.add(
                f"{shape}, {rows} rows",
                **ours,
                tokens_s=1e3 * rows / ours["step_ms"],
                floor_ms=floor_ms,
                floor_kv_ms=floor_kv_ms,
                transformers_ms=milliseconds,
                over_floor=ours["step_ms"] / floor_ms,
                over_floor_kv=ours["step_ms"] / floor_kv_ms,
                faster_than_transformers=milliseconds / ours["step_ms"],
            )
        del module
        free_memory(run.device)


def _our_step(run: Run, module: Any, rows: int) -> Row:
    context = run.sizes.context
    ours = Ours(module, rows, context + 1)
    ours.fill_pool()
    texts = random_texts([context + 1] * rows, module.config.vocab_size)
    ids = np.array([text[-1] for text in texts], np.int64)
    positions = np.full(rows, context, np.int64)
    spans = [(text, context, context + 1) for text in range(rows)]
    plan = ours.plan(spans)

    @torch.inference_mode()
    def step(_: int, given: Any = plan) -> torch.Tensor:
        best: torch.Tensor = ours.decoder.head(ours.step(ids, positions, given)).argmax(-1)
        return best

    def whole(number: int) -> list[int]:
        found: list[int] = step(number, ours.plan(spans)).tolist()
        return found

    step_ms = median_ms(step, run.device, run.sizes.repeats, warm_up=5)
    # As an engine runs it: each step is planned, and its tokens are copied to the host.
    return {"step_ms": step_ms, "with_host_ms": median_ms(whole, run.device, run.sizes.repeats)}


@torch.inference_mode()
def _their_step_ms(run: Run, module: Any, rows: int) -> float:
    """Milliseconds of transformers' step in bfloat16 with a static cache."""
    from transformers import StaticCache

    context, repeats, warm_up = run.sizes.context, run.sizes.repeats, 3
    cache = StaticCache(config=module.config, max_cache_len=context + repeats + warm_up)
    prompt = torch.randint(2, module.config.vocab_size, (rows, context), device=run.device)
    module(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def step(number: int) -> torch.Tensor:
        place = torch.tensor([[context + number]], device=run.device).expand(rows, 1)
        found = module(prompt[:, :1], past_key_values=cache, position_ids=place, use_cache=True)
        best: torch.Tensor = found.logits[:, -1].argmax(-1)
        return best

    return median_ms(step, run.device, repeats, warm_up)


def prefill(run: Run) -> None:
    """Time chunks of prompts, without the head."""
    chunk = run.sizes.chunk
    for shape in run.sizes.models:
        run.check()
        module = random_model(shape, run.device, has_outliers=False)
        ours = Ours(module, 1, chunk)
        (text,) = random_texts([chunk], module.config.vocab_size)
        positions, plan = np.arange(chunk, dtype=np.int64), ours.plan([(0, 0, chunk)])
        repeats = max(2, run.sizes.repeats // 4)
        with torch.inference_mode():
            milliseconds = median_ms(
                lambda _, ours=ours, text=text, plan=plan, positions=positions: ours.step(
                    text, positions, plan
                ),
                run.device,
                repeats,
            )
            ids = torch.as_tensor(text, device=run.device)[None]
            theirs_ms = median_ms(
                lambda _, module=module, ids=ids: module.model(ids, use_cache=False), run.device, repeats
            )
        tflop_s = 2 * num_layer_weights(module) * chunk / milliseconds / 1e9
        run.add(
            f"{shape}, {chunk} tokens",
            chunk_ms=milliseconds,
            tokens_s=1e3 * chunk / milliseconds,
            tflop_s=tflop_s,
            of_third_of_peak=tflop_s / (run.floors["matmul_bf16_tflop_s"] / 3),
            transformers_tokens_s=1e3 * chunk / theirs_ms,
            of_transformers=theirs_ms / milliseconds,
        )
        del module, ours
        free_memory(run.device)


def parts(run: Run) -> None:
    """Time the products of a layer; report bandwidth and arithmetic rate."""
    shape = run.sizes.models[-1]
    module = random_model(shape, run.device, has_outliers=False)
    config = module.config
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    kv = 2 * config.num_key_value_heads * config.head_dim
    weights = {
        "qkv": hidden * (queries + kv),
        "o": queries * hidden,
        "gate_up": 2 * hidden * inner,
        "down": hidden * inner,
        "head": hidden * config.vocab_size,
    }
    most = max(*run.sizes.decode_rows, run.sizes.chunk)
    ours = Ours(module, max(run.sizes.decode_rows), run.sizes.context + 1)
    for rows in sorted({*run.sizes.decode_rows, most}):
        run.check()
        for name, layers in ours.products().items():
            microseconds = 1e3 * product_ms(layers, rows, ours.decoder, run.device)
            cells: Row = {"rows": rows, "us": microseconds}
            if size := weights.get(name):
                cells["weights_gb_s"] = 2 * size / microseconds / 1e3
                cells["tflop_s"] = 2 * size * rows / microseconds / 1e6
            run.add(f"{shape} {name}", **cells)


def product_ms(layers: list[Any], rows: int, decoder: Any, device: str) -> float:
    """Milliseconds of a product, without the time that a launch takes on the host: as a CUDA graph."""
    width = layers[0].weight.shape[1]
    x = torch.randn(decoder.num_pieces, rows, width, device=device).bfloat16()
    repeats = max(4, len(layers))  # so many weights leave the L2 cache before they come again

    def multiply() -> None:
        for number in range(repeats):
            layers[number % len(layers)](x)

    if device == "cpu":
        return median_ms(lambda _: multiply(), device, 1) / repeats
    multiply()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply()
    return median_ms(lambda _: graph.replay(), device, 5) / repeats


# The engine


def engine(run: Run) -> None:
    """Measure the whole engine: generation with and without logprobs, prompts, the load, transfers."""
    from logprobe import LLM

    _transfers(run)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(random_model(run.sizes.models[0], run.device), folder)
        free_memory(run.device)
        is_small = run.device == "cpu"
        settings: dict[str, Any] = {
            "device": run.device,
            "max_num_seqs": max(run.sizes.requests),
            "max_num_batched_tokens": run.sizes.chunk,
            "kv_cache_memory_bytes": 1 << 21 if is_small else 4 << 30,
            "max_model_len": 128 if is_small else 2048,
        }
        for overlap in (False, True):
            run.check()
            started = time.perf_counter()
            with LLM(str(folder), async_scheduling=overlap, **settings) as llm:
                seconds = time.perf_counter() - started
                run.add("load", overlap=overlap, seconds=seconds)
                _generation(run, llm, overlap=overlap)
                if not overlap:
                    _prompts(run, llm)
            free_memory(run.device)


def _transfers(run: Run) -> None:
    """Time `AsyncCPUTransfer` over tensors of a few megabytes."""
    from logprobe.transport import AsyncCPUTransfer

    num = 16 if run.device == "cuda" else 2
    tensors = [torch.randn(run.sizes.copied_bytes // 4, device=run.device) for _ in range(2)]
    with AsyncCPUTransfer() as transfer:

        def copy_all() -> None:
            transfer.submit_transfer(tensors[0], 0)
            for number in range(num):
                if number + 1 < num:
                    transfer.submit_transfer(tensors[(number + 1) % 2], number + 1)
                transfer.get_result(number, 60)

        copy_all()
        seconds = wall_seconds(copy_all, run.device)
    rate = num * run.sizes.copied_bytes / seconds / 1e9
    floor = run.floors["d2h_pinned_gb_s"]
    run.add("AsyncCPUTransfer", gb_s=rate, of_pinned_copy=rate / floor)


def _generation(run: Run, llm: Any, *, overlap: bool) -> None:
    from logprobe import SamplingParams

    prompt_len, new = run.sizes.request_len
    vocab_size = llm.engine.capabilities().vocab_size
    for number, rows in enumerate(run.sizes.requests):
        base_rate = 0.0
        for setting, k in enumerate(run.sizes.logprobs[::2] if overlap else run.sizes.logprobs):
            run.check()
            params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, logprobs=k)

            def call(seed: int, rows: int = rows, params: Any = params) -> Any:
                prompts = [text.tolist() for text in random_texts([prompt_len] * rows, vocab_size, seed)]
                return llm.generate(prompts, params)

            # Other texts each time, which the prefix cache does not hold.
            first = 100 * number + 10 * setting
            call(first)  # kernels are compiled, and graphs captured, before what is timed
            seconds = min(wall_seconds(partial(call, first + again), run.device) for again in (1, 2))
            rate = rows * new / seconds
            base_rate = base_rate or rate
            run.add(
                f"generate, {rows} requests",
                overlap=overlap,
                logprobs="none" if k is None else k,
                tokens_s=rate,
                step_ms=1e3 * rows / rate,
                of_none=rate / base_rate,
            )


def _prompts(run: Run, llm: Any) -> None:
    from logprobe import SamplingParams

    num, length = run.sizes.scored
    vocab_size = llm.engine.capabilities().vocab_size
    for k in (0, TOP):
        run.check()
        params = SamplingParams(max_tokens=0, prompt_logprobs=k)

        def call(seed: int, params: Any = params) -> Any:
            texts = random_texts([length] * num, vocab_size, seed)
            return llm.generate([text.tolist() for text in texts], params)

        call(1)
        seconds = min(wall_seconds(partial(call, seed), run.device) for seed in (2 + k, 3 + k))
        run.add("score prompts", texts=num, tokens=length, logprobs=k, tokens_s=num * length / seconds)


def extract(run: Run) -> None:
    """Time extraction from logits; compare with PyTorch and with one read of the logits."""
    from logprobe.kernels.extraction.api import fill
    from logprobe.kernels.extraction.device import allocate, requests_on
    from logprobe.kernels.extraction.requests import check_requests, check_rows

    most, vocab_size = max(run.sizes.extract_rows), run.sizes.vocab_size
    base = 3 * torch.randn(most, vocab_size, device=run.device)
    for rows in run.sizes.extract_rows:
        # Other rows each time, as many as the base has: a few rows alone would stay in the L2 cache.
        pieces = list(base.split(rows))[: most // rows]
        chosen = torch.randint(vocab_size, (rows,))
        on_device = chosen.to(run.device)
        for k in run.sizes.extract_ks:
            run.check()
            asked = check_requests(check_rows(pieces[0]), chosen, k)
            requests = requests_on(asked, torch.device(run.device))
            output = allocate(requests, torch.device(run.device))
            milliseconds = median_ms(
                lambda number, pieces=pieces, requests=requests, output=output: fill(
                    pieces[number % len(pieces)], requests, output
                ),
                run.device,
                run.sizes.repeats,
            )

            def torchs(number: int, pieces: Any = pieces, on_device: Any = on_device, k: int = k) -> Any:
                found = pieces[number % len(pieces)].log_softmax(-1)
                return found.gather(1, on_device[:, None]), found.topk(k, dim=-1) if k else None

            torch_ms = median_ms(torchs, run.device, max(2, run.sizes.repeats // 2), warm_up=1)
            floor_ms = 1e3 * pieces[0].nbytes / run.bandwidth
            run.add(
                f"{rows} rows",
                k=k,
                ms=milliseconds,
                torch_ms=torch_ms,
                floor_ms=floor_ms,
                over_floor=milliseconds / floor_ms,
                faster_than_torch=torch_ms / milliseconds,
                **_extracted_as_wanted(pieces[0], asked, k),
            )


def _extracted_as_wanted(logits: torch.Tensor, asked: Any, k: int) -> Row:
    """The largest difference from float64, and ids that are not torch's, of a few rows."""
    from logprobe.kernels.extraction.api import extract_checked

    few = min(len(logits), 32)
    found = extract_checked(logits[:few], asked.rows(0, few))
    logprobs, token_ids = torch.as_tensor(found.logprobs), torch.as_tensor(found.token_ids)
    wanted = logits[:few].double().log_softmax(-1)
    largest = (logprobs.double() - wanted.gather(1, token_ids.long())).abs().max()
    ids = logits[:few].topk(k, dim=-1).indices if k else token_ids[:, 1:]
    return {"largest_nats": float(largest), "other_ids": int((ids != token_ids[:, 1:]).sum())}


# The run

# Section → its function and its most seconds.
SECTIONS: dict[str, tuple[Callable[[Run], None], float]] = {
    "machine": (machine, 20),
    "accuracy": (accuracy, 50),
    "bits": (bits, 60),
    "decode": (decode, 70),
    "prefill": (prefill, 45),
    "parts": (parts, 30),
    "engine": (engine, 80),
    "extract": (extract, 30),
}
MIN_S = 5.0  # a section is not begun with less


def measure(results: Results, names: Sequence[str], sizes: Sizes, deadline: float) -> int:
    """Run sections in this process; `CRASHED` where the GPU answers no more."""
    run = Run(results=results, sizes=sizes, device="cuda" if torch.cuda.is_available() else "cpu")
    for name in names:
        work, budget = SECTIONS[name]
        started = time.time()
        if deadline - started < MIN_S:
            results.sections[name] = {"rows": [], "not_run": "no time was left"}
            print(f"{name}: not run, no time was left", flush=True)
            results.write()
            continue
        run.section, run.deadline = name, min(started + budget, deadline)
        section: Row = {"rows": []}
        results.sections[name] = section
        results.content["running"] = {"section": name, "until": run.deadline + GRACE_S}
        results.write()
        print(f"\n{name}", flush=True)
        try:
            work(run)
        except OutOfTimeError:
            section["not_run"] = "the rest: its time was up"
            print("  the rest was not run: its time was up", flush=True)
        except Exception:  # noqa: BLE001 - recorded, and the next section runs
            section["error"] = traceback.format_exc()
            print(section["error"], flush=True)
        section["seconds"] = round(time.time() - started, 1)
        results.content["running"] = None
        results.write()
        if "error" in section and not _answers(run.device):
            return CRASHED
        free_memory(run.device)
    return 0


def _answers(device: str) -> bool:
    """False after an error that ends all GPU work of this process, such as an illegal access."""
    try:
        synchronize(device)
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True


def supervise(results: Results, names: Sequence[str], given: argparse.Namespace, deadline: float) -> None:
    """Run sections in a process that is started again without a section that crashed it or hung."""
    remaining = list(names)
    while remaining:
        command = [sys.executable, __file__, "--child", str(deadline), "--only", ",".join(remaining)]
        command += ["--out", str(results.path), *(["--small"] if given.small else [])]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            ending = _wait(process, results, deadline)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        results.read()
        running = results.content.get("running")
        stopped = running["section"] if running else None
        if stopped is not None:
            results.sections[stopped]["error"] = ending
            results.content["running"] = None
        done = results.sections.keys()
        left = [name for name in remaining if name not in done]
        if len(left) == len(remaining):  # the process did not come to its first section
            results.sections[left[0]] = {"rows": [], "error": ending}
            left = left[1:]
        if stopped is not None or ending != "it ended with status 0":
            print(f"{stopped or 'the process'}: {ending}", flush=True)
        remaining = left
        results.write()


def _wait(process: subprocess.Popen[bytes], results: Results, deadline: float) -> str:
    """Wait for a process to end, or for its section to be over its time."""
    until = time.time() + START_S
    while True:
        try:
            return f"it ended with status {process.wait(timeout=0.5)}"
        except subprocess.TimeoutExpired:
            running = json.loads(results.path.read_text(encoding="utf-8")).get("running")
        if running:
            until = running["until"]
        if time.time() > min(until, deadline + GRACE_S):
            return "it was killed: it ran over its time"


def _heading(column: str) -> str:
    words = column.replace("_", " ")
    return words.replace("tflop s", "TFLOP/s").replace("gb s", "GB/s")


def tables(content: dict[str, Any]) -> Iterator[str]:
    """The results as Markdown."""
    facts = content.get("machine", {})
    yield ", ".join(f"{name} {value}" for name, value in facts.items())
    for name, section in content["sections"].items():
        yield f"\n### `{name}`"
        columns: list[str] = []
        for row in section["rows"]:
            if list(row) != columns:
                columns = list(row)
                yield ""
                yield "| " + " | ".join(map(_heading, columns)) + " |"
                yield "|---" * len(columns) + "|"
            yield "| " + " | ".join(_shown(value) for value in row.values()) + " |"
        for kind in ("not_run", "skipped"):
            if kind in section:
                yield f"\nNot run: {section[kind]}."
        if "error" in section:
            yield f"\nFailed: `{section['error'].strip().splitlines()[-1]}`"


def write_page(content: dict[str, Any], page: Path) -> None:
    """Replace the figures of a page by those of a run."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = "\n".join(tables(content))
    page.write_text(f"{before}{BEGIN}\n{lines}\n{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the JSON file of the results")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections with commas between")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all sections together")
    parser.add_argument("--small", action="store_true", help="tiny sizes, also on a CPU")
    parser.add_argument(
        "--page", type=Path, help="write the results of --out into this page, measure nothing"
    )
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)  # its deadline
    given = parser.parse_args(arguments)
    results = Results(path=given.out)
    if given.page is not None:
        results.read()
        write_page(results.content, given.page)
        return 0
    names = [name for name in SECTIONS if name in given.only.split(",")]
    if unknown := set(given.only.split(",")) - SECTIONS.keys():
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available() and not given.small:
        parser.error("there is no NVIDIA GPU here; --small runs on a CPU")
    if given.child is not None:
        results.read()
        return measure(results, names, Sizes.small() if given.small else Sizes(), given.child)
    deadline = time.time() + given.seconds
    results.content = {"sections": {}}
    results.write()
    supervise(results, names, given, deadline)
    failed = [name for name, section in results.sections.items() if "error" in section]
    left_out = [name for name, section in results.sections.items() if "not_run" in section]
    print("\n" + "\n".join(tables(results.content)))
    print(f"\nfailed: {', '.join(failed) or 'none'}; not run or not whole: {', '.join(left_out) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
