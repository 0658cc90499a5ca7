"""FastDeploy's page on logits processors: both offline examples, the start command, both request forms."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai

from logprobe.compat.fastdeploy import (
    LLM,
    LogitBiasLogitsProcessor,
    LogitsProcessor,
    SamplingParams,
    ThinkingBudgetLogitsProcessor,
)
from server_process import serving_process

if TYPE_CHECKING:
    from pathlib import Path

    import torch

MESSAGES: Any = [{"role": "user", "content": "the cat"}]
FAVOURED = 70
BIAS = {"logit_bias": {FAVOURED: 100.0}}


class ClipLogitsProcessor(LogitsProcessor):
    """The page's example of a custom processor: bounds for the logits of requests that set them."""

    def __init__(self, fd_config: Any) -> None:
        assert fd_config.dtype == "float32"
        self.bounds: list[Any] = []

    def update_state(self, share_inputs: dict[str, Any]) -> None:
        stop_flags = share_inputs["stop_flags"]
        arguments = share_inputs["logits_processors_args"]
        self.bounds = [one for one, is_stopped in zip(arguments, stop_flags, strict=True) if not is_stopped]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, bounds in enumerate(self.bounds):
            if bounds.clip_max is not None:
                logits[row] = logits[row].clamp(max=bounds.clip_max)
        return logits


def start(folder: Path, processors: list[Any]) -> LLM:
    return LLM(
        model=str(folder),
        engine_worker_queue_port=8282,
        cache_queue_port=8383,
        logits_processors=processors,
        kv_cache_memory_bytes=1 << 20,
    )


def test_a_built_in_one_by_its_name(tiny_model_folder: Path) -> None:
    with start(tiny_model_folder, ["LogitBiasLogitsProcessor"]) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3, logits_processors_args=BIAS)
        outputs = llm.chat(MESSAGES, params)
        assert outputs[0].outputs.token_ids == [FAVOURED] * 3
        assert outputs[0].outputs.text == llm.text.text_of([FAVOURED] * 3)
        plain = llm.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=3))
        assert plain[0].outputs.token_ids != [FAVOURED] * 3


def test_built_in_ones_by_their_classes(tiny_model_folder: Path) -> None:
    with start(tiny_model_folder, [LogitBiasLogitsProcessor, ThinkingBudgetLogitsProcessor]) as llm:
        begin, end, word = llm.text.tokenizer.convert_tokens_to_ids(["Ġthe", "Ġa", "Ġcat"])
        arguments = {
            "logit_bias": {word: 100.0},
            "thinking_budget": 2,
            "think_start_token_ids": [begin],
            "think_end_token_ids": [end],
        }
        params = SamplingParams(temperature=0.0, max_tokens=4, logits_processors_args=arguments)
        [output] = llm.generate([[5, begin]], params)
        assert output.outputs.token_ids == [word, word, end, word]


def test_one_of_ones_own_by_its_class(tiny_model_folder: Path) -> None:
    with start(tiny_model_folder, [ClipLogitsProcessor]) as llm:
        asked = [{"clip_max": -50.0}, None]
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=1,
                logprobs=3,
                logprobs_mode="processed_logprobs",
                logits_processors_args=arguments or {},
            )
            for arguments in asked
        ]
        clipped, plain = (output.outputs for output in llm.generate([[5, 6, 7]] * 2, params))
        flat = clipped.logprobs.top_entries().logprobs
        assert float(flat.max() - flat.min()) < 1e-6, "all logits are one number"
        spread = plain.logprobs.top_entries().logprobs
        assert float(spread.max() - spread.min()) > 0.1


def test_the_start_command_and_both_ways_to_ask(tiny_model_folder: Path) -> None:
    flags = "--metrics-port 0 --engine-worker-queue-port 8182 --cache-queue-port 8183 --enable-logprob"
    chosen = ("--logits-processors", "LogitBiasLogitsProcessor", "ThinkingBudgetLogitsProcessor")
    with serving_process(tiny_model_folder, *flags.split(), *chosen) as server:
        body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "logits_processors_args": BIAS}
        sent = server.send("/v1/chat/completions", json.dumps(body).encode(), Host=f"0.0.0.0:{server.port}")
        assert sent.status == 200, sent.data
        by_curl = json.loads(sent.data)["choices"][0]["message"]["content"]
        with openai.Client(base_url=f"http://0.0.0.0:{server.port}/v1", api_key="EMPTY_API_KEY") as client:
            reply = client.chat.completions.create(
                model="default",
                messages=MESSAGES,
                temperature=0,
                max_tokens=3,
                extra_body={"logits_processors_args": BIAS},
            )
            plain = client.chat.completions.create(
                model="default", messages=MESSAGES, temperature=0, max_tokens=3
            )
        assert reply.choices[0].message.content == by_curl != plain.choices[0].message.content
