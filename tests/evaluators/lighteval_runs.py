"""lighteval's documents, models and metrics on hand-made data; runs in lighteval's own environment.

`python lighteval_runs.py ROWS own|ours ARGUMENTS` prints one line of JSON. It avoids lighteval's registry of
tasks: that of 0.13.0 downloads files on import, and uses a keyword that huggingface_hub 1 lacks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lighteval.metrics import apply_metric
from lighteval.metrics.metrics import Metrics
from lighteval.metrics.metrics_sample import LoglikelihoodAcc
from lighteval.metrics.normalizations import LogProbCharNorm
from lighteval.metrics.utils.metric_utils import SampleLevelMetric
from lighteval.models.model_loader import load_model
from lighteval.tasks.requests import Doc, SamplingMethod

ACC = Metrics.loglikelihood_acc.value
ACC_NORM = SampleLevelMetric(
    metric_name="acc_norm",
    sample_level_fn=LoglikelihoodAcc(logprob_normalization=LogProbCharNorm()),
    category=SamplingMethod.LOGPROBS,
    corpus_level_fn=ACC.corpus_level_fn,
    higher_is_better=True,
)


def main() -> None:
    rows, whose, arguments = sys.argv[1:]
    questions = json.loads(Path(rows).read_text())
    model = model_of(whose, arguments)
    asked = [
        Doc(
            query=f"Question: {row['question']}\nAnswer:",
            choices=[f" {choice}" for choice in row["choices"]],
            gold_index=row["answer"],
            generation_size=12,
            stop_sequences=["\n"],
            id=str(number),
            task_name="local|0",
        )
        for number, row in enumerate(questions)
    ]
    scored, written = model.loglikelihood(asked), model.greedy_until(asked)
    found: dict[str, Any] = {
        "logprobs": [response.logprobs for response in scored],
        "greedy": [response.argmax_logits_eq_gold for response in scored],
        "texts": [response.text for response in written],
        "metrics": mean(apply_metric(responses=scored, docs=asked, metrics=[ACC, ACC_NORM])),
        "exact_match": mean(apply_metric(responses=written, docs=asked, metrics=[Metrics.exact_match.value])),
    }
    if whose == "ours":
        texts = [
            Doc(query="", choices=[row["text"]], gold_index=0, id=str(number), task_name="texts|0")
            for number, row in enumerate(questions)
        ]
        found["rolling"] = [response.logprobs for response in model.loglikelihood_rolling(texts)]
    sys.stdout.write(json.dumps(found) + "\n")


def model_of(whose: str, arguments: str) -> Any:
    if whose == "own":
        from lighteval.models.transformers.transformers_model import TransformersModelConfig

        return load_model(TransformersModelConfig.from_args(arguments))
    from lighteval.models.custom.custom_model import CustomModelConfig

    from logprobe.integrations import lighteval

    # Like `lighteval custom MODEL FILE`.
    return load_model(CustomModelConfig(model_name=arguments, model_definition_file_path=lighteval.__file__))


def mean(outputs: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(float(output[name]) for output in outputs) / len(outputs) for name in outputs[0]}


if __name__ == "__main__":
    main()
