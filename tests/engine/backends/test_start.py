"""A start from the cache does not import transformers."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

START = """
import sys
from logprobe import LLM, SamplingParams
with LLM(sys.argv[1], weights="checkpoint", kv_cache_memory_bytes=1 << 21) as llm:
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=1, prompt_logprobs=1)
    text = llm.generate("the cat and", params)[0].outputs[0].text
    score = llm.score([("the cat", " and the")])[0]
    messages = [{"role": "user", "content": "hi"}]
    reply = llm.chat(messages, params)[0].outputs[0].text
    print(f"{text!r} {reply!r} {score.logprob:.3f} {'transformers' in sys.modules}")
    tokenizer = llm.tokenizer
    print(type(tokenizer).__name__, repr(tokenizer.apply_chat_template(messages, tokenize=False)))
"""


def start(folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", START, str(folder)], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_second_start_loads_transformers_for_its_tokenizer_alone_and_when_asked(
    tiny_model_folder: Path,
) -> None:
    start(tiny_model_folder)
    first, second = start(tiny_model_folder)
    assert first.endswith(" False")
    assert second == "ExactTokenizer 'user: hi\\n'"
