"""Classes named as in genlm-backend: asynchronous next-token language models, and capture of whole rows.

They do not need genlm-backend; `integrations.genlm` has subclasses of genlm-backend's `AsyncLM`, which do.

Differences from genlm-backend's `AsyncVirtualLM`:

- `AsyncVirtualLM(llm_engine, ...)`: accepts any `vllm.LLM` whose model runs in this process. If the model
  runs in other processes, create the engine with `engine_options()`
- `from_name`: the model runs in separate processes unless you set `VLLM_ENABLE_V1_MULTIPROCESSING=0`, which
  genlm-backend sets for the whole program
- `GlobalLogprobsCapture` as `logprobs_capture`: receives the result of each call as one step, in the order of
  the requests; in genlm-backend it keeps only the latest step
- `batch_next_token_logprobs_sync`: neither reads nor fills the cache, unless you pass `use_cache=True`
- `lora_name=`: named `lora=` here; `LogprobeVirtualLM` takes `lora_name`
- `eos_token_ids`: passed to vLLM as ids. genlm-backend passes stop strings, which also match if other tokens
  spell them
- `batch_sample(..., seed=1)` of equal prompts: returns distinct, reproducible samples
- `cache`: None with `cache_size=0`; keys include the current LoRA adapter
- `underlying_model`, `llm_engine`: vLLM's module and the `vllm.LLM`, if the model runs in this process
- `add_new_lora(path, name)`: reads the path immediately; running requests keep their adapter
- `reset_async_queries()`, `cleanup()`: a reset ends waiting requests with an error; `cleanup` does not stop
  an engine that you passed in
- an empty prompt: means BOS if the model has one; vLLM rejects it
- `queries`, `timer`, `lora_request`, `lora_name_to_ids`: not available

To use a capture class of your own, register it with `LLM(logits_processors=[TheClass])`. The engine creates
the only instance, `llm.processors.registered["TheClass"]`. `GlobalLogprobsCapture` keeps at most `max_bytes`
(256 MiB) of a step's distributions, and logs a message if it drops some. Differences from genlm-backend:

- `apply(logits)`: gets every row of the step's logits in float32, also for greedy requests and before
  temperature
- `get_logprobs(index)`: -1 is the last; any index without a distribution returns None
- the distributions after a call: the prompts of one call run in one step. If they exceed `max_num_seqs` or
  `kv_cache_memory_bytes`, the class has only the distributions of the last step, and a warning is logged
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names
from logprobe.compat.genlm_names import AsyncLM
from logprobe.next_token import Token
from logprobe.processors import GlobalLogprobsCapture

if TYPE_CHECKING:
    from logprobe.compat.genlm_vllm import AsyncVirtualLM

__all__ = ["AsyncLM", "AsyncVirtualLM", "GlobalLogprobsCapture", "Token"]

__getattr__ = lazy_names(__name__, {"AsyncVirtualLM": "logprobe.compat.genlm_vllm"})
