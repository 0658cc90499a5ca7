import re
import sys
from pathlib import Path

import pytest

import logprobe
from logprobe.kernels.hooks import HOOKS, LIBGOMP, Hook, missing_hooks

SOURCES = sorted(Path(logprobe.__file__).parent.rglob("*.py"))
PRIVATE = re.compile(r"torch\.ops\.|\btorch\._|CDLL\((?!None)|numba\.core\.caching")


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.library}:{hook.name}")
def test_the_library_still_has_it(hook: Hook) -> None:
    if hook.library == LIBGOMP and sys.platform != "linux":
        pytest.skip("torch runs on libgomp on Linux only")
    assert hook.find() is not None, (
        f"{hook.library} no longer has {hook.name} ({hook.purpose}); {hook.without}"
    )


def test_one_that_is_gone_is_named() -> None:
    gone = Hook(library="torch", name="ops.aten._no_such_operator", purpose="", without="")
    assert gone.find() is None
    assert not [hook for hook in missing_hooks() if hook.library != LIBGOMP]


def test_none_is_looked_up_anywhere_else() -> None:
    found = {
        path.name: line
        for path in SOURCES
        for line in path.read_text(encoding="utf-8").splitlines()
        if PRIVATE.search(line) and path.name != "hooks.py" and '"""' not in line and "`torch._" not in line
    }
    assert found == {}
