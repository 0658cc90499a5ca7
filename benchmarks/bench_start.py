"""This measures time and memory from starting a process to its first token, on a converted model.

`logprobe generate` is the command line; the others are a script that loads the model and asks for one token.
A server's first token is the first one streamed over HTTP with its logprobs. Memory is what is resident then,
and what is left after `close()`. A first call, which proves the model and leaves that in the cache, is not
counted. All packages are compiled to bytecode, as pip leaves what it installs.
"""

import compileall
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from harness import (
    OURS,
    ROOT,
    Arena,
    Contestant,
    Figure,
    Measure,
    Target,
    alternate,
    parse_options,
    publish,
)
from process import RIVALS, RivalError, RivalProcess
from prompts import prompts
from servers import MODEL_NAME, Program, our_program, serving, vllm_program

from logprobe import LLM, SamplingParams

LIBRARY = "logprobe, library"
WANTED = (OURS, "vllm", "transformers", "llama_cpp")
VLLM_SERVER = "vllm server"
LIMIT_S = 0.6
SERVER_LIMIT_S = 1.0
LIMIT_MB = 220.0
CLOSED = "logprobe, closed"
TRANSFORMERS = "transformers float32"
LLAMA_CPP_FORM = "q8_0"
LLAMA_CPP = f"llama_cpp {LLAMA_CPP_FORM}"
RESIDENT = "int(open('/proc/self/statm').read().split()[1]) * 4096 / 1e6"
PROGRAMS = {
    OURS: f"""
from logprobe import LLM, SamplingParams
llm = LLM({{folder!r}})
llm.generate("The capital of France is", SamplingParams(max_tokens=1, temperature=0, logprobs=5))
print({RESIDENT})
llm.close()
print({RESIDENT})
""",
    TRANSFORMERS: f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({{folder!r}})
model = AutoModelForCausalLM.from_pretrained({{folder!r}}, dtype=torch.float32).eval()
with torch.inference_mode():
    model(**tokenizer("The capital of France is", return_tensors="pt"))
print({RESIDENT})
""",
    LLAMA_CPP: f"""
import sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.prefix + "/weights.{LLAMA_CPP_FORM}.gguf"
params.n_ctx = 2048
server = xllamacpp.Server(params)
server.handle_completions({{{{"prompt": "The capital of France is", "max_tokens": 1, "logprobs": 5}}}})
print({RESIDENT})
""",
}
STEP_ROWS = 512


def command_s(arena: Arena) -> float:
    """Seconds of `logprobe generate` with one token."""
    program = str(Path(sys.executable).with_name("logprobe"))
    asked = {"--model": str(arena.model_folder), "--max-tokens": "1", "--temperature": "0", "--logprobs": "5"}
    command = [
        program,
        "generate",
        "The capital of France is",
        *(word for pair in asked.items() for word in pair),
    ]
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def process_s(arena: Arena, contestant: Contestant, _number: int) -> float:
    """Seconds from starting a rival's process to its answer of one token."""
    name, variant = contestant
    asked = {"prompts": prompts(arena.model_folder, 1, 8, seed=0), "new_tokens": 1, "logprobs": 5}
    with RivalProcess(RIVALS[name]) as process:
        model = {"variant": variant, "model_folder": str(arena.folder_of(name))}
        process.ask({"verb": "decode", "inputs": [asked], **model})
        return time.perf_counter() - process.started


def figure(arena: Arena) -> Figure:
    """Seconds to the first token."""
    labels = {
        LIBRARY if name == OURS else name: one
        for name, one in arena.labels(*WANTED).items()
        if one[1] in {"best", LLAMA_CPP_FORM} or name == OURS
    }
    contestants: dict[str, Measure] = {OURS: lambda _: command_s(arena)}
    for name, one in labels.items():
        contestants[name] = partial(process_s, arena, one)
    samples, notes = alternate(contestants, arena.options.rounds)
    return Figure(
        name="process start to first token",
        unit="s",
        better="lower",
        samples=samples,
        targets=[Target(at_most=LIMIT_S), Target(against="transformers best", at_least=1 / 0.6)],
        notes=[*notes, *arena.missing(*WANTED)],
    )


def resident_mb(arena: Arena, name: str) -> list[float]:
    """Megabytes that a program prints of itself, in a process of its own."""
    script = PROGRAMS[name].format(folder=str(arena.folder_of(name)))
    python = RIVALS["llama_cpp"].python if name == LLAMA_CPP else sys.executable
    done = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True)
    return [float(line) for line in done.stdout.split()]


def memory_figure(arena: Arena) -> Figure:
    """Resident memory at the first token."""
    ours = [resident_mb(arena, OURS) for _ in range(min(arena.options.rounds, 3))]
    theirs = [resident_mb(arena, TRANSFORMERS)[0] for _ in ours]
    samples = {OURS: [one[0] for one in ours], CLOSED: [one[1] for one in ours], TRANSFORMERS: theirs}
    if "llama_cpp" in arena.options.rivals and RIVALS["llama_cpp"].is_installed:
        samples[LLAMA_CPP] = [resident_mb(arena, LLAMA_CPP)[0] for _ in ours]
    return Figure(
        name="resident memory at the first token",
        unit="MB",
        better="lower",
        samples=samples,
        targets=[Target(at_most=LIMIT_MB), Target(against=TRANSFORMERS, at_least=1 / 0.8)],
    )


def step_figure(arena: Arena) -> Figure:
    """Seconds of a step whose slots were never used, beside the same on used slots."""
    with LLM(str(arena.model_folder), max_num_batched_tokens=STEP_ROWS) as llm:
        ids = [token_id % 256 for token_id in range(STEP_ROWS)]
        llm.generate([ids[:8]], SamplingParams(max_tokens=1))
        seconds: dict[str, list[float]] = {OURS: [], "slots used before": []}
        for name, times in seconds.items():
            for number in range(arena.options.rounds):
                if name != OURS:
                    llm.engine.forget_prefixes()
                began = time.perf_counter()
                llm.generate([[number + 1, *ids[1:]]], SamplingParams(max_tokens=1))
                times.append(time.perf_counter() - began)
    return Figure(
        name=f"a step of {STEP_ROWS} tokens on slots never used, and a token",
        unit="s",
        better="lower",
        samples=seconds,
        notes=[f"the worst: {max(seconds[OURS]):.3f} s"],
    )


def served_s(program: Program, _number: int) -> float:
    """Seconds from starting a server to the first token of its first stream."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 5,
        "stream": True,
    }
    started = time.perf_counter()
    with serving(program) as served, served.open("/v1/chat/completions", body) as reply:
        if any(b'"logprob":' in line for line in reply):
            return time.perf_counter() - started
    raise RivalError(f"{program.words[0]}: the stream ended without a token")


def server_figure(arena: Arena) -> Figure:
    """Seconds to a server's first token."""
    contestants: dict[str, Measure] = {OURS: partial(served_s, our_program(arena.model_folder))}
    if "vllm" in arena.options.rivals and RIVALS["vllm"].is_installed:
        contestants[VLLM_SERVER] = partial(served_s, vllm_program(arena.float_folder))
    samples, notes = alternate(contestants, min(arena.options.rounds, 3))
    return Figure(
        name="server start to first streamed token",
        unit="s",
        better="lower",
        samples=samples,
        targets=[Target(at_most=SERVER_LIMIT_S)],
        notes=[*notes, *arena.missing("vllm")],
    )


def main() -> None:
    """Run the figures."""
    options = parse_options(__doc__ or "")
    with Arena(options) as arena:
        if not options.is_smoke:
            compileall.compile_dir(ROOT / "src", quiet=1)
            command_s(arena)
        figures = [figure(arena), server_figure(arena), memory_figure(arena), step_figure(arena)]
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
