"""From log-probabilities to answers: measures, scores, texts of any length, data sets, comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names

if TYPE_CHECKING:
    from logprobe.scoring.auditing.endpoint import Endpoint as Endpoint
    from logprobe.scoring.auditing.report import AuditReport as AuditReport
    from logprobe.scoring.auditing.run import audit as audit
    from logprobe.scoring.baseline.models import Baseline as Baseline
    from logprobe.scoring.baseline.models import compare_with_baseline as compare_with_baseline
    from logprobe.scoring.baseline.models import save_baseline as save_baseline
    from logprobe.scoring.comparison import Acceptance as Acceptance
    from logprobe.scoring.comparison import Comparison as Comparison
    from logprobe.scoring.comparison import compare as compare
    from logprobe.scoring.comparison import compare_stored as compare_stored
    from logprobe.scoring.comparison import compare_with_stored as compare_with_stored
    from logprobe.scoring.data.run import score_dataset as score_dataset
    from logprobe.scoring.data.settings import DataSettings as DataSettings
    from logprobe.scoring.data.summary import Summary as Summary
    from logprobe.scoring.detection import binoculars as binoculars
    from logprobe.scoring.distillation.run import DistilSummary as DistilSummary
    from logprobe.scoring.distillation.run import distil as distil
    from logprobe.scoring.distillation.settings import DistilSettings as DistilSettings
    from logprobe.scoring.fields import Field as Field
    from logprobe.scoring.fields import fields_of as fields_of
    from logprobe.scoring.labels import Classification as Classification
    from logprobe.scoring.labels import Judgement as Judgement
    from logprobe.scoring.labels import classify as classify
    from logprobe.scoring.labels import judge as judge
    from logprobe.scoring.labels import rerank as rerank
    from logprobe.scoring.masked import MaskedLM as MaskedLM
    from logprobe.scoring.masked import MaskedScore as MaskedScore
    from logprobe.scoring.masked import MaskedWord as MaskedWord
    from logprobe.scoring.members import FieldDistribution as FieldDistribution
    from logprobe.scoring.members import Members as Members
    from logprobe.scoring.pairs import MinimalPairs as MinimalPairs
    from logprobe.scoring.pairs import minimal_pairs as minimal_pairs
    from logprobe.scoring.rollout_files import Rollout as Rollout
    from logprobe.scoring.rollout_files import read_rollouts as read_rollouts
    from logprobe.scoring.rollout_files import write_rollouts as write_rollouts
    from logprobe.scoring.rollouts import RolloutReport as RolloutReport
    from logprobe.scoring.rollouts import compare_rollouts as compare_rollouts
    from logprobe.scoring.score import Score as Score
    from logprobe.scoring.texts import ScoredText as ScoredText
    from logprobe.scoring.texts import Unit as Unit
    from logprobe.scoring.texts import surprisal as surprisal
    from logprobe.scoring.uncertainty import LowConfidence as LowConfidence
    from logprobe.scoring.uncertainty import SampledAnswer as SampledAnswer
    from logprobe.scoring.uncertainty import Uncertainty as Uncertainty
    from logprobe.scoring.windows import Perplexity as Perplexity
    from logprobe.scoring.windows import perplexity as perplexity

# Public name -> the module that holds it.
_HOMES = {
    "Acceptance": ".comparison",
    "AuditReport": ".auditing.report",
    "Baseline": ".baseline.models",
    "Classification": ".labels",
    "Comparison": ".comparison",
    "DataSettings": ".data.settings",
    "DistilSettings": ".distillation.settings",
    "DistilSummary": ".distillation.run",
    "Endpoint": ".auditing.endpoint",
    "Field": ".fields",
    "FieldDistribution": ".members",
    "Judgement": ".labels",
    "LowConfidence": ".uncertainty",
    "MaskedLM": ".masked",
    "MaskedScore": ".masked",
    "MaskedWord": ".masked",
    "Members": ".members",
    "MinimalPairs": ".pairs",
    "Perplexity": ".windows",
    "Rollout": ".rollout_files",
    "RolloutReport": ".rollouts",
    "SampledAnswer": ".uncertainty",
    "Score": ".score",
    "ScoredText": ".texts",
    "Summary": ".data.summary",
    "Uncertainty": ".uncertainty",
    "Unit": ".texts",
    "audit": ".auditing.run",
    "binoculars": ".detection",
    "classify": ".labels",
    "compare": ".comparison",
    "compare_rollouts": ".rollouts",
    "compare_stored": ".comparison",
    "compare_with_baseline": ".baseline.models",
    "compare_with_stored": ".comparison",
    "distil": ".distillation.run",
    "fields_of": ".fields",
    "judge": ".labels",
    "minimal_pairs": ".pairs",
    "perplexity": ".windows",
    "read_rollouts": ".rollout_files",
    "rerank": ".labels",
    "save_baseline": ".baseline.models",
    "score_dataset": ".data.run",
    "surprisal": ".texts",
    "write_rollouts": ".rollout_files",
}

__all__ = list(_HOMES)

__getattr__ = lazy_names(__name__, _HOMES)
