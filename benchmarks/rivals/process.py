"""A rival in its own process and environment: start it, give it jobs, end it with all its children."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

SCRIPTS = Path(__file__).resolve().parent
ENVIRONMENTS = SCRIPTS.parents[1] / ".rivals"
THREADS = 2

_COMMON_ENVIRONMENT = {
    "OMP_NUM_THREADS": str(THREADS),
    "MKL_NUM_THREADS": str(THREADS),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class RivalError(Exception):
    """A rival could not be started, did not answer in time, died, or failed at a job."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """How to start one rival, and what it can do."""

    name: str
    python: Path
    variants: tuple[str, ...] = ("best", "default")
    environment: Mapping[str, str] = field(default_factory=dict)
    # Further variants, for processors with matrix units for bfloat16 -> options with which a process of its
    # own opens the model; it runs as the first of `variants`.
    bfloat16: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def script(self) -> Path:
        """The rival's own script; the underscore keeps it from hiding the package that it imports."""
        return SCRIPTS / f"{self.name}_.py"

    @property
    def is_installed(self) -> bool:
        """Whether ``make rivals`` has built its environment."""
        return self.python.exists()


def _own_python(name: str) -> Path:
    return ENVIRONMENTS / name / "bin" / "python"


# vLLM leaves one of two cores unused unless told which ones to compute on; its cache is reserved at start.
_VLLM_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
}
_BFLOAT16 = {"bfloat16": {"dtype": "bfloat16"}}
# This project is not installed beside vLLM, whose environment all checkouts share.
_OUR_SOURCE = {**_VLLM_ENVIRONMENT, "PYTHONPATH": str(SCRIPTS.parents[1] / "src")}

RIVALS = {
    rival.name: rival
    for rival in (
        Rival(
            name="logprobe",
            python=Path(sys.executable),
            variants=("default",),
            bfloat16={"bf16x3": {"arithmetic": "bf16x3"}},
        ),
        Rival(name="transformers", python=Path(sys.executable), bfloat16=_BFLOAT16),
        Rival(name="vllm", python=_own_python("vllm"), environment=_VLLM_ENVIRONMENT, bfloat16=_BFLOAT16),
        Rival(name="vllm_transport", python=_own_python("vllm"), variants=("default",)),
        Rival(name="virtual_lm", python=_own_python("vllm"), variants=("default",), environment=_OUR_SOURCE),
        Rival(
            name="genlm_vllm",
            python=_own_python("vllm"),
            variants=("default",),
            environment=_VLLM_ENVIRONMENT,
        ),
        Rival(name="genlm", python=_own_python("genlm")),
        Rival(name="lm_eval", python=_own_python("lm_eval")),
        Rival(name="minicons", python=_own_python("minicons")),
        Rival(name="surprisal", python=_own_python("surprisal")),
        Rival(name="llama_cpp", python=_own_python("llama_cpp"), variants=("q8_0",)),
    )
}


class RivalProcess:
    """One running rival; owns its process, its pipes and its log file."""

    def __init__(
        self,
        rival: Rival,
        *,
        log_name: str = "",
        log_folder: Path = ENVIRONMENTS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if not rival.is_installed:
            raise RivalError(f"{rival.name} has no environment; build it: make rivals")
        self.rival = rival
        log_folder.mkdir(parents=True, exist_ok=True)
        self._log_path = log_folder / f"{log_name or rival.name}.log"
        self._log = self._log_path.open("w")
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            [str(rival.python), str(rival.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **_COMMON_ENVIRONMENT, **rival.environment, **(environment or {})},
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read_lines, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process itself; it may have children."""
        return self._process.pid

    def _read_lines(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put("")  # the end, for one who waits

    def ask(self, job: Mapping[str, Any], *, timeout_s: float = 600.0) -> dict[str, Any]:
        """Give one job and wait for its result.

        Raises:
            RivalError: no answer within ``timeout_s`` seconds, the process ended, or the job failed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=timeout_s)
        except (queue.Empty, BrokenPipeError) as error:
            self.close(grace_s=0.0)
            raise RivalError(
                f"{self.rival.name} gave no answer ({type(error).__name__}); see {self._log_path}"
            ) from error
        if not line:
            code = self._process.wait()
            raise RivalError(f"{self.rival.name} ended with code {code}; see {self._log_path}")
        result: dict[str, Any] = json.loads(line)
        if not result["ok"]:
            raise RivalError(f"{self.rival.name}: {result['error']}")
        return result

    def pause(self) -> None:
        """Stop the process and its children, so that none of them spins beside another's measurement."""
        self._signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        self._signal_group(signal.SIGCONT)

    def close(self, *, grace_s: float = 15.0) -> None:
        """End the process and its children: by the end of its input, then by signal."""
        assert self._process.stdin is not None
        self.resume()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self._kill_group(signal.SIGTERM)
        self._kill_group(signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._log.close()

    def _kill_group(self, which: signal.Signals) -> None:
        self._signal_group(which)
        time.sleep(0.5)

    def _signal_group(self, which: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, which)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
