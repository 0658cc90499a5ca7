from __future__ import annotations

import subprocess
import sys

import pytest

import logprobe.records


def test_the_package_loads_without_the_heavy_libraries() -> None:
    script = (
        "import sys, logprobe.records as r; r.FlatLogprobs([None]).to_bytes(); "
        "print([name for name in ('torch', 'pyarrow', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", logprobe.records.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(logprobe.records, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        logprobe.records.nothing  # noqa: B018
