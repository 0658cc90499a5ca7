from __future__ import annotations

import subprocess
import sys

import logprobe.processors


def test_every_public_name_loads() -> None:
    assert sorted(logprobe.processors.__all__) == logprobe.processors.__all__
    for name in logprobe.processors.__all__:
        assert getattr(logprobe.processors, name) is not None


def test_parameters_are_checked_without_torch() -> None:
    code = (
        "import sys; from logprobe import SamplingParams; import logprobe.processors; "
        "SamplingParams(logit_bias={1: 2.0}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0
