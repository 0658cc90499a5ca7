"""The figures of docs/performance.md by area: title → benchmark → names of its figures."""

_REAL = "bench_real --model llama-1b"
_WIDTHS = ("decode, batch 1, logprobs 20", "decode, batch 8, logprobs 20", "decode, batch 32, logprobs 20")
_EXTRACT = (
    "V=49152 k=20 rows=1 threads=1",
    "V=49152 k=20 rows=32 threads=1",
    "V=151936 k=20 rows=32 threads=1",
)


def _real(*forms: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{form}: {name}" for form in forms for name in names)


AREAS: dict[str, dict[str, tuple[str, ...]]] = {
    "Generation": {
        "bench_decode": _WIDTHS,
        "bench_decode --rivals vllm": _WIDTHS,
        "bench_decode --model gemma3-270m": _WIDTHS,
        "bench_speculate": (
            "code editing, 1 at once",
            "summaries with quotes, 1 at once",
            "stories, 1 at once",
            "stories, 4 at once",
        ),
    },
    "Scoring": {
        "bench_score": (
            "scoring, 512-token prompts, top 20",
            "scoring a 8000-token prompt, top 20: memory over the model",
            "scoring a 8000-token prompt, top 20",
        ),
        "bench_score --rivals vllm": ("scoring, 512-token prompts, top 20",),
        "bench_shared_prefix": (
            "4 continuations to one 256-token context, ours in process",
            "4 continuations to one 256-token context, ours over HTTP",
        ),
        "bench_surprisal": ("surprisals of 64 sentences, smollm2",),
        "bench_dataset": ("memory from 10 % to 100 % of 1,000,000 rows",),
    },
    "What log-probabilities cost": {
        "bench_logprobs_cost --rivals vllm": (
            "generation, batch 32, logprobs = 0",
            "generation, batch 32, logprobs = 20",
            "generation, batch 32, logprobs = 1000",
            "generation, batch 32, logprobs = whole vocabulary",
        ),
        "bench_logprobs_cost": ("scoring, 512-token prompts, with entropy and varentropy and margin",),
        "extract": _EXTRACT,
        "bench_records": ("build, 512 rows a call", "record to chat JSON"),
    },
    "Next-token distributions": {
        "bench_next_token": (
            "next-token rows, 64 prefixes of 32 tokens sharing 24",
            "next-token rows in vLLM, 64 prefixes of 32 tokens sharing 24",
            "longest stall of the event loop in all rounds",
        ),
    },
    "Server and processes": {
        "bench_server": ("chat streams, 32 at once, logprobs 20",),
        "bench_layouts": (
            "decode, batch 32, tokens alone, an engine process (ours)",
            "decode, batch 32, `logprobs=-1`, the whole vocabulary, an engine process (ours)",
        ),
        "bench_transport": ("rows with 20 alternatives", "rows with the whole vocabulary"),
    },
    "Start and weights": {
        "bench_start": (
            "process start to first token",
            "server start to first streamed token",
            "resident memory at the first token",
        ),
        "bench_start --rivals transformers": (
            "process start to first token",
            "resident memory at the first token",
        ),
        "bench_reload": (
            "load_weights of a bfloat16 state, a thread",
            "decode after load_weights of a bfloat16 state, a thread, batch 1, logprobs 20",
        ),
    },
    "A model of 1.2 billion weights": {
        _REAL: _real(
            "bfloat16, 2,472 MB",
            names=(
                "first load",
                "later load",
                "peak memory, later load",
                *_WIDTHS,
                "prompts of 512 tokens, top 20",
            ),
        ),
        f"{_REAL} --rivals llama_cpp": _real(
            "bfloat16, 2,472 MB",
            "q8_0, 1,317 MB",
            "q4_k_m, 803 MB",
            names=("decode, batch 1, logprobs 20", "decode, batch 32, logprobs 20"),
        ),
    },
    "Kernels": {
        "bench_weights": tuple(f"products of a step, {rows} rows" for rows in (1, 8, 32, 512)),
        "bench_parts": (
            "attention of 1 tokens on a context of 500",
            "attention of 512 tokens on a context of 2000",
        ),
        "bench_processors": ("Grammar, within a JSON string, 32 rows of 49152",),
    },
}
"""A figure that was not recorded is left out of the page, and so is an area without figures."""
PREFIXES = {
    "bench_records": "records: ",
    "bench_speculate": "speculative decoding: ",
    "bench_transport": "from process to process: ",
    "extract": "extraction: ",
}
"""Text before the names of a benchmark's figures."""
