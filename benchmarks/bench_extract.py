"""This measures the extraction of top-k, chosen logprob, rank and log-normaliser from rows of logits, a row.

Held against torch's own chain (log_softmax, topk, gather, compare and count) and, as the floor, against one
`sum` over the same logits, which does nothing but read them. All take turns in this process.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from harness import OURS, Figure, Measure, Options, Target, alternate, parse_options, publish

from logprobe.kernels import extract, threads

CHAIN, READ = "torch chain", "one sum pass"
SAMPLE_S = 0.05
TIMES_CHAIN = {(49152, 20): 6.0, (151936, 20): 10.0, (49152, 1000): 3.0, (151936, 1000): 3.0}
TIMES_READ = 1 / 6


def chain(logits: torch.Tensor, chosen_ids: torch.Tensor, k: int) -> None:
    """What one writes with the operators of torch; a sort where the whole vocabulary is asked for."""
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(k).values if k >= 0 else logprobs.sort(descending=True).values
    chosen = logprobs.gather(-1, chosen_ids[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    assert len(ranks) == len(top)


def per_row_us(call: Callable[[], object], num_rows: int, _number: int) -> float:
    """Microseconds a row, over as many calls as fill the time of a sample."""
    call()
    calls, passed, started = 0, 0.0, time.perf_counter()
    while passed < SAMPLE_S:
        call()
        calls += 1
        passed = time.perf_counter() - started
    return 1e6 * passed / calls / num_rows


def figure(vocab_size: int, k: int, num_rows: int, rounds: int) -> Figure:
    """One shape of the work on torch's present number of threads."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    chosen_ids = torch.randint(vocab_size, (num_rows,), generator=generator)
    calls: dict[str, Callable[[], object]] = {
        OURS: lambda: extract(logits, chosen_ids, k),
        CHAIN: lambda: chain(logits, chosen_ids, k),
        READ: lambda: logits.sum(-1),
    }
    contestants: dict[str, Measure] = {
        name: partial(per_row_us, call, num_rows) for name, call in calls.items()
    }
    samples, notes = alternate(contestants, rounds)
    targets = (
        [Target(against=CHAIN, at_least=TIMES_CHAIN[vocab_size, k])] if (vocab_size, k) in TIMES_CHAIN else []
    )
    if k == 20:
        targets.append(Target(against=READ, at_least=TIMES_READ))
    return Figure(
        name=f"V={vocab_size} k={k} rows={num_rows} threads={threads.num_threads()}",
        unit="µs/row",
        better="lower",
        samples=samples,
        targets=targets if threads.num_threads() == 1 else (),
        notes=notes,
    )


def figures(options: Options) -> Iterator[Figure]:
    """Every shape, on one thread and on two."""
    sizes = (1000,) if options.is_smoke else (49152, 151936)
    for num_threads in (1, 2):
        threads.set_num_threads(num_threads)
        for vocab_size in sizes:
            for k in (20, 1000, -1):
                for num_rows in (1, 32):
                    yield figure(vocab_size, k, num_rows, options.rounds)


def main() -> None:
    """Run and publish."""
    assert __doc__
    options = parse_options(__doc__)
    publish("extract", [*figures(options)], options)


if __name__ == "__main__":
    main()
