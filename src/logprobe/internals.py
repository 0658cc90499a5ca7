"""Private names of other packages that this package uses, why it uses them, and what breaks without them.

Any release of those packages may remove such names. A test compares this list with the names in the
source that have a leading underscore, and looks up every name, so that a removed name fails a test, not a
request.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Internals:
    """Private names in one class or module of another package."""

    owner: str  # an importable module, or module:Class
    names: tuple[str, ...]  # names with a leading underscore, or undocumented
    used_in: tuple[str, ...]  # files below `logprobe`
    purpose: str
    without: str


VLLM_WORKER = ("llm_engine", "engine_core", "engine_core", "model_executor", "driver_worker", "worker")
"""Attributes from a `vllm.LLM` to the one worker that runs in its process."""
VLLM_PROCESSORS = ("model_runner", "input_batch", "logitsprocs")
"""Attributes from that worker to the logits processors of the V1 model runner."""

INTERNALS = (
    Internals(
        owner="typer._click.parser:_OptionParser",
        names=("_long_opt",),
        used_in=("cli/serve.py",),
        purpose="several names may follow --logits-processors, as in FastDeploy's command line",
        without="`logprobe serve` ends with an AttributeError",
    ),
    Internals(
        owner="torch.nn:Module",
        names=("_modules",),
        used_in=("engine/forward/torch/transformers_decoder.py",),
        purpose="replaces submodules in a shallow copy of a model",
        without="models that need the transformers decoder cannot be loaded",
    ),
    Internals(
        owner="uvicorn.protocols.http.httptools_impl:HttpToolsProtocol",
        names=(
            *("_unsupported_upgrade_warning", "send_400_response", "cycle", "timeout_keep_alive_task"),
            *("_start_asgi_task", "parser", "pipeline", "url"),
        ),
        used_in=("server/http/protocol.py",),
        purpose="closes slow connections, and counts those that send no request",
        without="the server fails at its first connection",
    ),
    Internals(
        owner="vllm:LLM",
        names=(
            *dict.fromkeys(VLLM_WORKER + VLLM_PROCESSORS),
            *("argmax_invariant", "non_argmax_invariant", "output_handler"),
        ),
        used_in=("integrations/vllm/existing.py", "integrations/vllm/offline.py"),
        purpose="wraps a `vllm.LLM` or `AsyncLLM` that was created without this library",
        without="only engines created with this library's options can be used",
    ),
)
