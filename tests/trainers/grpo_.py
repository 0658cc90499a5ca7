"""TRL's unmodified GRPO with a `rollout_func`: a server samples with the policy's weights of each step.

Arguments: the server's address, an operator key, the policy's folder, and an output folder.
"""

import json
import sys
from pathlib import Path
from typing import Any

import requests
import torch
import transformers
import trl
import vllm
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

TEMPERATURE, MAX_TOKENS = 0.9, 10
url, key, policy, folder = sys.argv[1:]
client = VLLMClient(base_url=url)
info = client.get_server_info()
assert info["model_config"]["logprobs_mode"] == "processed_logprobs"
assert client.get_world_size() == 1
tokenizer = AutoTokenizer.from_pretrained(policy)
largest_gap: list[float] = []  # per step, nats: between the sampler's and the trainer's log-probabilities
versions: list[str] = []


def push(trainer: GRPOTrainer) -> None:
    """Save the policy's weights and load them into the server by its operator route."""
    path = Path(folder) / f"step-{trainer.state.global_step}"
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(path)
    reply = requests.post(
        f"{url}/update_weights_from_disk",
        json={"model_path": str(path), "weight_version": path.name},
        headers={"Authorization": f"Bearer {key}"},
        timeout=120,
    )
    reply.raise_for_status()
    versions.append(reply.json()["weight_version"])


@torch.no_grad()
def gap(trainer: GRPOTrainer, prompt: list[int], completion: list[int], logprobs: list[float]) -> float:
    """Return how far the trainer's full softmax is from the sampling log-probabilities, nats."""
    logits = trainer.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    rows = (logits.double() / TEMPERATURE).log_softmax(-1)
    own = rows.gather(1, torch.tensor(completion)[:, None])[:, 0]
    return float((own - torch.tensor(logprobs)).abs().max())


def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """Sample one completion per prompt; the trainer repeats each prompt by its group size."""
    push(trainer)
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    output = client.generate(ids, temperature=TEMPERATURE, max_tokens=MAX_TOKENS, logprobs=0)
    chosen = [[row[0] for row in rows] for rows in output["logprobs"]]
    named = [[row[0] for row in rows] for rows in output["logprob_token_ids"]]
    assert output["prompt_ids"] == ids
    assert named == output["completion_ids"]
    gaps = [gap(trainer, *one) for one in zip(ids, named, chosen, strict=True)]
    largest_gap.append(max(gaps))
    return {"prompt_ids": ids, "completion_ids": named, "logprobs": chosen}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward distinct tokens."""
    return [len(set(ids)) / MAX_TOKENS for ids in completion_ids]


args = GRPOConfig(
    output_dir=folder,
    per_device_train_batch_size=8,
    num_generations=4,
    temperature=TEMPERATURE,
    max_completion_length=MAX_TOKENS,
    learning_rate=1e-3,
    max_steps=4,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    bf16=False,
    seed=1,
)
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
    reward_funcs=reward,
    args=args,
    train_dataset=Dataset.from_dict({"prompt": ["the cat and", "a dog on the", "in the of", "s the an"]}),
    processing_class=tokenizer,
    rollout_func=rollout,
)
trainer.train()
client.session.headers["Authorization"] = f"Bearer {key}"
client.reset_prefix_cache()
told = {
    "versions": {module.__name__: module.__version__ for module in (trl, transformers, torch, vllm)},
    "weights": versions,
    "gaps": largest_gap,
    "rewards": [row["reward"] for row in trainer.state.log_history if "reward" in row],
}
sys.stdout.write(f"{json.dumps(told)}\n")
