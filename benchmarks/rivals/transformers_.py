"""transformers and the torch chain log_softmax -> topk -> gather -> compare, which is what its users write.

best: a prompt's output head on 64 rows at a time; default: logits of the whole prompt at once. Generation is
the same in both: ``generate`` with ``output_logits``, then the chain step by step.
"""

from typing import Any

import torch
from protocol import Read, TokenIds, extend_all, serve
from transformers import AutoModelForCausalLM

HEAD_ROWS = 64


def torch_chain(logits: torch.Tensor, chosen: torch.Tensor, k: int) -> torch.Tensor:
    """Top-k, the chosen token's logprob and its rank, over rows; returns the chosen logprobs (nats)."""
    logprobs = logits.float().log_softmax(-1)
    if k:
        logprobs.topk(min(k, logprobs.shape[-1]), dim=-1)
    of_chosen = logprobs.gather(-1, chosen[:, None])
    (logprobs > of_chosen).sum(-1).add_(1)
    return of_chosen[:, 0]


class Transformers:
    """One model for all verbs."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._is_best = True
        dtype = getattr(torch, job.get("options", {}).get("dtype", "float32"))
        self._model = AutoModelForCausalLM.from_pretrained(job["model_folder"], dtype=dtype).eval()

    def use(self, variant: str) -> None:
        """Choose how much of the prompt's logits is made at once."""
        self._is_best = variant == "best"

    @torch.inference_mode()
    def decode(self, prompts: list[TokenIds], new_tokens: int, logprobs: int | None) -> Read:
        """Greedy ``generate``; prompts have equal lengths, so nothing is padded."""
        input_ids = torch.tensor(prompts)
        out = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            output_logits=logprobs is not None,
            return_dict_in_generate=True,
        )
        chosen = out.sequences[:, input_ids.shape[1] :]
        if logprobs is not None:
            k = self._model.config.vocab_size if logprobs == -1 else logprobs
            for step, logits in enumerate(out.logits):
                torch_chain(logits, chosen[:, step], k)
        return chosen.tolist

    @torch.inference_mode()
    def score(self, prompts: list[TokenIds], top: int) -> Read:
        """A forward pass a prompt, then the chain."""
        one = self._score_in_chunks if self._is_best else self._score_whole
        rows = [one(torch.tensor([prompt]), top) for prompt in prompts]
        return lambda: [row.tolist() for row in rows]

    def _score_in_chunks(self, ids: torch.Tensor, top: int) -> torch.Tensor:
        hidden = self._model.base_model(ids, use_cache=False).last_hidden_state[0, :-1]
        head = self._model.get_output_embeddings()
        chunks = zip(hidden.split(HEAD_ROWS), ids[0, 1:].split(HEAD_ROWS), strict=True)
        return torch.cat([torch_chain(head(rows), targets, top) for rows, targets in chunks])

    def _score_whole(self, ids: torch.Tensor, top: int) -> torch.Tensor:
        logits = self._model(ids, use_cache=False).logits[0, :-1]
        return torch_chain(logits, ids[0, 1:], top)

    def shared_prefix(self, context: TokenIds, continuations: list[TokenIds]) -> Read:
        """Each context + continuation is scored by itself."""
        read_rows = self.score([[*context, *tail] for tail in continuations], top=0)
        return lambda: [sum(row[len(context) - 1 :]) for row in read_rows()]

    @torch.inference_mode()
    def next_token(self, prefixes: list[TokenIds], rounds: list[list[int]]) -> Read:
        """All prefixes of a round in one forward pass; only the last position's logits are computed."""
        rows = torch.empty(0)
        for tokens in rounds:
            logits = self._model(torch.tensor(prefixes), use_cache=False, logits_to_keep=1).logits[:, -1]
            rows = logits.log_softmax(-1)
            prefixes = extend_all(prefixes, tokens)
        return lambda: rows.argmax(-1).tolist()


if __name__ == "__main__":
    serve(Transformers, packages=("transformers", "torch"))
