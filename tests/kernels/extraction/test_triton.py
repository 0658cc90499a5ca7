"""The Triton extraction kernel against the float64 reference, in Triton's interpreter on the CPU."""

import json
import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton", reason="Triton has no build for this platform")
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))

COMPARE = """
import json
import numpy as np
import torch
from logprobe.kernels.extraction import triton as cuda
from logprobe.kernels.extraction import reference
from logprobe.kernels.extraction.requests import check_requests, check_rows
from logprobe.kernels.extraction.device import allocate
from logprobe.records.rows import KERNEL_EXTRAS

def compare(logits, k, given_ids=None):
    chosen_ids = torch.randint(logits.shape[1], (len(logits),), generator=generator)
    asked = {"given_ids": given_ids} | dict.fromkeys(KERNEL_EXTRAS, True)
    requests = check_requests(check_rows(logits), chosen_ids, k, **asked)
    got = allocate(requests, logits.device)
    cuda.fill(logits, requests, got)
    want = reference.extract(logits, chosen_ids, k, dtype=np.float64, **asked)
    assert np.array_equal(got.is_valid, want.is_valid), (got.is_valid, want.is_valid)
    assert np.array_equal(got.ranks, want.ranks)
    for row, num in enumerate(want.num_logprobs.tolist()):
        assert np.array_equal(got.token_ids[row, :num + 1], want.token_ids[row, :num + 1]), (row, num)
        close(got.logprobs[row, :num + 1], want.logprobs[row, :num + 1])
    close(got.lse, want.lse)
    for name in KERNEL_EXTRAS:
        close(got.extras[name], want.extras[name])
    if given_ids is not None:
        assert np.array_equal(got.given.ranks, want.given.ranks)
        close(got.given.logprobs, want.given.logprobs)

def close(got, want):
    exact = want.astype(np.float64)
    np.testing.assert_allclose(got.double().numpy(), exact, rtol=1.2e-7, atol=3e-6, equal_nan=True)

def same_alone(logits, k, given_ids):
    requests = check_requests(check_rows(logits), [1] * len(logits), k, given_ids=given_ids, entropy=True)
    together = allocate(requests, logits.device)
    cuda.fill(logits, requests, together)
    for row in range(len(logits)):
        own = check_requests((1, logits.shape[1]), [1], k[row], given_ids=[given_ids[row]], entropy=True)
        alone = allocate(own, logits.device)
        cuda.fill(logits[row : row + 1], own, alone)
        width = k[row] + 1
        assert torch.equal(alone.token_ids, together.token_ids[row : row + 1, :width])
        assert torch.equal(alone.logprobs, together.logprobs[row : row + 1, :width])
        assert torch.equal(alone.lse, together.lse[row : row + 1])
        assert torch.equal(alone.entropy, together.entropy[row : row + 1])
        entries = slice(*together.given.offsets[row : row + 2].tolist())
        assert torch.equal(alone.given.logprobs, together.given.logprobs[entries])
        assert torch.equal(alone.given.ranks, together.given.ranks[entries])

# The interpreter's time goes with the splits and the sorted pairs; a row passes through the same ones here.
cuda.SPLIT, cuda.PART, cuda.LEVELS, cuda.TOPS = 32, 4, (4, 2), {4: 4, 16: 4}
cuda.MAX_TORCH_TOPK, cuda.PAIRS_BYTES = 40, 4000
generator = torch.Generator().manual_seed(0)
compared = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    is_whole = dtype == torch.float32
    compared[str(dtype)] = 0
    for vocab_size in (1, 32, 33, 129) if is_whole else (129,):
        logits = 3 * torch.randn(6, vocab_size, generator=generator)
        logits[1] = logits[1].round()
        logits[2, 1:] = -torch.inf
        logits[3, 0] = torch.nan
        logits[4] = -torch.inf
        given_ids = [[0, 0], None, [vocab_size - 1], [0], [0], list(range(min(20, vocab_size)))]
        for k in (0, [0, 3, 14, 1, 2, 5], 20, -1) if is_whole else (7,):
            compare(logits.to(dtype), k, given_ids)
            compared[str(dtype)] += 1
    compare((3 * torch.randn(4, 150, generator=generator)).to(dtype)[::2, 7:], 20)
    compare(torch.full((2, 50), torch.inf).to(dtype), 3)
    compare(torch.tensor([[0.0, -0.0, 0.0, -1.0]]).to(dtype), 3)
    ties = torch.zeros(3, 100)  # across parts, ranges and splits
    ties[1, 31:34] = ties[1, 70] = 1
    ties[2, ::9] = -torch.inf
    for k in (3, 10, 30, 70):
        compare(ties.to(dtype), k, [[31, 70, 0]] * 3)
    apart = torch.zeros(2, 100)  # splits of nothing but -inf, and further apart than e**-745
    apart[:, 32:64] = -torch.inf
    apart[1, 64:] = -60000
    compare(apart.to(dtype), 20)
    rows = (3 * torch.randn(4, 96, generator=generator)).to(dtype)
    same_alone(rows, [2, 9, 30, 50], [[1], [2, 3], [], list(range(40))])
    same_alone(rows[:, 1:], [2, 9, 30, 50], [[1], [2, 3], [], list(range(40))])
print(json.dumps(compared))
"""


@pytest.mark.skipif(VERSION < (3, 8), reason="the interpreter of Triton 3.7 cannot run its own topk")
def test_the_gpu_kernel_gives_the_numbers_of_the_twin_in_every_type() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", COMPARE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {"torch.float32": 16, "torch.float16": 1, "torch.bfloat16": 1}


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from logprobe.kernels.extraction import triton as cuda

LOGITS = dict(logits="*bf16", row_stride="i64")
ROWS = LOGITS | {"vocab_size": "i32"}
CHOSEN = dict(chosen_ids="*i32", sums="*fp32")
OUTPUT = dict(token_ids="*i32", logprobs="*fp32", width="i64")
NUMBERS = dict(
    ranks="*i32", exact_lses="*fp64", lses="*fp32", valid="*i1", entropies="*fp32", varentropies="*fp32",
    margins="*fp32",
)
TOP = dict(maxima="*fp32", maxima_stride="i64", num_logprobs="*i32", lses="*fp64")
GIVEN = dict(lses="*fp64", offsets="*i64", token_ids="*i32", logprobs="*fp32", ranks="*i32")
MOMENTS = {"has_varentropy": True, "has_margin": True}
for kernel, arguments, fixed in (
    (
        cuda._split_kernel,
        ROWS | CHOSEN | {"maxima": "*fp32"},
        MOMENTS | {"has_maxima": True, "part": 16, "split": 2048},
    ),
    (
        cuda._merge_kernel,
        LOGITS | CHOSEN | {"num_splits": "i32"} | OUTPUT | NUMBERS,
        MOMENTS | {"has_entropy": True, "splits": 64},
    ),
    (cuda._top_kernel, ROWS | TOP | OUTPUT, dict(top=32, part=16, large=32, small=4, num_ranges=256)),
    (cuda._pack_kernel, ROWS | {"pairs": "*i64"}, {"split": 2048}),
    (cuda._given_kernel, ROWS | GIVEN, {"split": 2048}),
):
    signature = arguments | dict.fromkeys(fixed, "constexpr")
    constants = {(list(signature).index(name),): value for name, value in fixed.items()}
    source = ASTSource(kernel, signature, constexprs=constants)
    print("cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm)
"""


def test_the_kernels_compile_for_a_gpu_on_a_machine_without_one() -> None:
    command = [sys.executable, "-c", COMPILE]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True"] * 5
