"""lm-evaluation-harness' `hf` model; best: four continuations a batch; default: its batch size of one."""

from typing import Any

from lm_eval.models.huggingface import HFLM
from protocol import Read, TokenIds, serve


class LmEval:
    """Continuations scored after a context, through the method that its tasks call, with token ids given."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._lm = HFLM(pretrained=job["model_folder"], device="cpu", dtype="float32", max_length=2048)

    def use(self, variant: str) -> None:
        """Set how many continuations make a batch."""
        self._lm.batch_size_per_gpu = 4 if variant == "best" else 1

    def shared_prefix(self, context: TokenIds, continuations: list[TokenIds]) -> Read:
        """Summed logprobs (nats) of each continuation."""
        requests = [(("", str(index)), context, tail) for index, tail in enumerate(continuations)]
        answers = self._lm._loglikelihood_tokens(requests, disable_tqdm=True)  # noqa: SLF001
        return lambda: [float(total) for total, _ in answers]


if __name__ == "__main__":
    serve(LmEval, packages=("lm_eval", "torch", "transformers"))
