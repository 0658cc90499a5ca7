"""Analyses built on log-probabilities: metrics, scores, long texts, data sets and model comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names

if TYPE_CHECKING:
    from logprobe.analysis.activation_files import activations_to_arrow as activations_to_arrow
    from logprobe.analysis.activation_files import save_activations as save_activations
    from logprobe.analysis.auditing.conformance import ConformanceReport as ConformanceReport
    from logprobe.analysis.auditing.conformance import check_conformance as check_conformance
    from logprobe.analysis.auditing.endpoint import Endpoint as Endpoint
    from logprobe.analysis.auditing.report import AuditReport as AuditReport
    from logprobe.analysis.auditing.run import audit as audit
    from logprobe.analysis.baseline.models import Baseline as Baseline
    from logprobe.analysis.baseline.models import compare_with_baseline as compare_with_baseline
    from logprobe.analysis.baseline.models import save_baseline as save_baseline
    from logprobe.analysis.classification import Classification as Classification
    from logprobe.analysis.classification import Confidence as Confidence
    from logprobe.analysis.comparison import Acceptance as Acceptance
    from logprobe.analysis.comparison import Comparison as Comparison
    from logprobe.analysis.comparison import compare as compare
    from logprobe.analysis.comparison import compare_stored as compare_stored
    from logprobe.analysis.comparison import compare_with_stored as compare_with_stored
    from logprobe.analysis.confidence import FittedConfidence as FittedConfidence
    from logprobe.analysis.confidence import calibrate as calibrate
    from logprobe.analysis.datasets.run import Summary as Summary
    from logprobe.analysis.datasets.run import score_dataset as score_dataset
    from logprobe.analysis.datasets.settings import DataSettings as DataSettings
    from logprobe.analysis.detection import binoculars as binoculars
    from logprobe.analysis.distillation.run import DistilSummary as DistilSummary
    from logprobe.analysis.distillation.run import distil as distil
    from logprobe.analysis.distillation.settings import DistilSettings as DistilSettings
    from logprobe.analysis.labels import Judgement as Judgement
    from logprobe.analysis.lens import LogitLens as LogitLens
    from logprobe.analysis.masked import MaskedLM as MaskedLM
    from logprobe.analysis.masked import MaskedScore as MaskedScore
    from logprobe.analysis.masked import MaskedWord as MaskedWord
    from logprobe.analysis.members import FieldDistribution as FieldDistribution
    from logprobe.analysis.members import Members as Members
    from logprobe.analysis.pairs import MinimalPairs as MinimalPairs
    from logprobe.analysis.rollout_files import Rollout as Rollout
    from logprobe.analysis.rollout_files import read_rollouts as read_rollouts
    from logprobe.analysis.rollout_files import write_rollouts as write_rollouts
    from logprobe.analysis.rollouts import RolloutReport as RolloutReport
    from logprobe.analysis.rollouts import compare_rollouts as compare_rollouts
    from logprobe.analysis.score import Score as Score
    from logprobe.analysis.texts import ScoredText as ScoredText
    from logprobe.analysis.texts import Unit as Unit
    from logprobe.analysis.uncertainty import LowConfidence as LowConfidence
    from logprobe.analysis.uncertainty import SampledAnswer as SampledAnswer
    from logprobe.analysis.uncertainty import Uncertainty as Uncertainty
    from logprobe.analysis.verification import Verification as Verification
    from logprobe.analysis.verification import verify as verify
    from logprobe.analysis.windows import Perplexity as Perplexity
    from logprobe.records.fields import Field as Field
    from logprobe.records.fields import fields_of as fields_of

# Public name -> module that defines it.
_HOMES = {
    "Acceptance": ".comparison",
    "AuditReport": ".auditing.report",
    "Baseline": ".baseline.models",
    "Classification": ".classification",
    "Comparison": ".comparison",
    "Confidence": ".classification",
    "ConformanceReport": ".auditing.conformance",
    "DataSettings": ".datasets.settings",
    "DistilSettings": ".distillation.settings",
    "DistilSummary": ".distillation.run",
    "Endpoint": ".auditing.endpoint",
    "Field": "logprobe.records.fields",
    "FieldDistribution": ".members",
    "FittedConfidence": ".confidence",
    "Judgement": ".labels",
    "LogitLens": ".lens",
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
    "Summary": ".datasets.run",
    "Uncertainty": ".uncertainty",
    "Unit": ".texts",
    "Verification": ".verification",
    "activations_to_arrow": ".activation_files",
    "audit": ".auditing.run",
    "binoculars": ".detection",
    "calibrate": ".confidence",
    "check_conformance": ".auditing.conformance",
    "compare": ".comparison",
    "compare_rollouts": ".rollouts",
    "compare_stored": ".comparison",
    "compare_with_baseline": ".baseline.models",
    "compare_with_stored": ".comparison",
    "distil": ".distillation.run",
    "fields_of": "logprobe.records.fields",
    "read_rollouts": ".rollout_files",
    "save_activations": ".activation_files",
    "save_baseline": ".baseline.models",
    "score_dataset": ".datasets.run",
    "verify": ".verification",
    "write_rollouts": ".rollout_files",
}

__all__ = list(_HOMES)

__getattr__ = lazy_names(__name__, _HOMES)
