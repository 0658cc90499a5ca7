"""TRL's unmodified server distillation: a student learns from a teacher behind a server.

Arguments: the server's address, the folders of the student and the teacher, and an output folder.
"""

import json
import sys

import torch
import transformers
import trl
import vllm
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

TEMPERATURE, TOP = 0.8, 8
PROMPTS = ["the cat and", "a dog on the", "in the of", "s the an"]


def trained(student: str, url: str, folder: str, steps: int) -> ServerDistillationTrainer:
    """Train for some steps; the trainer's log has the loss of each."""
    args = ServerDistillationConfig(
        output_dir=folder,
        teacher_model_server_url=url,
        beta=0.0,  # forward KL, over the teacher's best tokens and the rest
        loss_top_k=TOP,
        temperature=TEMPERATURE,
        max_completion_length=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        learning_rate=3e-3,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        seed=1,
    )
    trainer = ServerDistillationTrainer(
        model=AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=AutoTokenizer.from_pretrained(student),
    )
    trainer.train()
    return trainer


def losses(trainer: ServerDistillationTrainer) -> list[float]:
    """Return the loss of each step."""
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def largest_difference(trainer: ServerDistillationTrainer, teacher: str) -> float:
    """Return the largest difference between the client's and transformers' numbers, nats."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    sequences, starts = [[5, 60, 61, 70, 12, 9], [7, 8, 200, 33]], [2, 1]
    found = trainer.teacher_client.get_sequence_logprobs(
        sequences, starts, top_logprobs=TOP, temperature=TEMPERATURE
    )
    largest = 0.0
    for place, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([sequence])).logits[0, start - 1 : -1].double()
        rows = (logits / TEMPERATURE).log_softmax(-1)
        best = rows.gather(1, torch.tensor(found["logprob_token_ids"][place]))
        own = rows.gather(1, torch.tensor(sequence[start:])[:, None])
        assert torch.equal(best.topk(TOP).values, best), "the best come first"
        assert (best - rows.topk(TOP).values).abs().max() < 1e-5
        largest = max(largest, (best - torch.tensor(found["logprobs"][place])).abs().max().item())
        actual = torch.tensor(found["actual_logprobs"][place])
        seen = actual.isfinite()  # the client looks it up in the reply
        assert seen.all(), "the chosen token always comes"
        largest = max(largest, (own - actual).abs().max().item())
    return largest


url, student, teacher, folder = sys.argv[1:]
learning = trained(student, url, folder, 12)
itself = trained(teacher, url, folder, 1)
told = {
    "versions": {module.__name__: module.__version__ for module in (trl, transformers, torch, vllm)},
    "losses": losses(learning),
    "loss_of_the_teacher": losses(itself)[0],
    "difference": largest_difference(learning, teacher),
}
sys.stdout.write(f"{json.dumps(told)}\n")
