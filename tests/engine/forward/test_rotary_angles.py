"""Cosines and sines of rotary angles have the same bits with narrower vector instructions."""

from __future__ import annotations

import os
import subprocess
import sys

WIDE = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4"
# As in `Decoder.fill`.
CODE = """
import hashlib
import numpy as np

digest = hashlib.sha256()
for base, dim in ((1e4, 64), (5e5, 128)):
    frequencies = (1.0 / base ** (np.arange(0, dim, 2) / dim)).astype(np.float32)
    angles = (np.arange(1 << 15, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    for function in (np.cos, np.sin):
        digest.update(function(angles).astype(np.float32).tobytes())
print(digest.hexdigest())
"""


def digest(**variables: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | variables)
    return done.stdout


def test_cosines_and_sines_do_not_depend_on_the_width_of_vectors() -> None:
    assert digest() == digest(NPY_DISABLE_CPU_FEATURES=WIDE)
