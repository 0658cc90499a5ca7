"""Endpoints with one fault each, named by its own kind; and one without, which passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from audit_proxy import FAULTS, faulty
from conftest import save_adapters, save_tiny_llama
from logprobe import LLM
from logprobe.analysis import AuditReport, Endpoint, audit
from logprobe.analysis.auditing.conformance import ConformanceReport, check_conformance
from logprobe.analysis.auditing.report import CONFORMANCE_KINDS
from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.analysis.auditing.report import Finding

LORA = "wide"
TEXTS = ("The harbour was quiet in the early light.", "Q: What is the capital of France?\nA:", "à Paris 🌊")
OF_TWO_AUDITS = {"stale_weights", "changed"}
OF_LORA = {"lora_prompt"}
OF_CONFORMANCE = {name for name, fault in FAULTS.items() if fault.kind in CONFORMANCE_KINDS}


@dataclass(frozen=True)
class Served:
    """A server, the model behind it, and what one audit of it found."""

    url: str
    llm: Any
    tuned: Any  # the same with LoRA weights
    new: Any  # with other weights

    def audit(
        self, fault: str | None, *, lora: str | None = None, refused: tuple[str, ...] = (), **asked: Any
    ) -> AuditReport:
        llm = self.llm if lora is None else self.tuned
        with faulty(self.url, fault, base="base", loras=[LORA], refused=refused) as address:
            return audit(
                Endpoint(address), asked.pop("llm", llm), lora=lora, texts=TEXTS, quick=True, **asked
            )

    def check_conformance(self, fault: str | None) -> ConformanceReport:
        with faulty(self.url, fault) as address:
            return check_conformance(address, self.llm, model="base")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, new_serving: Any) -> Iterator[Served]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("audited"), max_position_embeddings=2048)
    other = save_tiny_llama(tmp_path_factory.mktemp("new"), max_position_embeddings=2048, rope_theta=20_000.0)
    adapters = save_adapters(folder, tmp_path_factory)
    room: dict[str, Any] = {
        "kv_cache_memory_bytes": 1 << 23,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 64,
    }
    with LLM(str(folder), **room) as llm, LLM(str(other), **room) as new:
        llm.add_lora(LORA, adapters[LORA])
        settings = ServerSettings(
            max_logprobs=-1, model_name="base", lora_modules=(f"{LORA}={adapters[LORA]}",)
        )
        with new_serving(llm, settings) as (url, app):
            app.state.service.prepare()
            yield Served(url, llm, llm.with_lora(LORA), new)


@pytest.fixture(scope="module")
def before(served: Served) -> AuditReport:
    return served.audit(None)


def faults(report: AuditReport | ConformanceReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity == "fault"]


def kinds(report: AuditReport | ConformanceReport) -> list[str]:
    return [finding.kind for finding in faults(report)]


def check_named(report: AuditReport | ConformanceReport, fault: str) -> None:
    told = FAULTS[fault]
    assert isinstance(report, ConformanceReport) or report.numbers == "FAIL"
    assert told.kind in kinds(report), report.findings
    assert {*kinds(report)} <= {told.kind} | told.also
    (finding,) = [finding for finding in faults(report) if finding.kind == told.kind]
    assert finding.evidence or finding.count


def test_there_are_as_many_faults_as_were_seen() -> None:
    assert len(FAULTS) >= 26


def test_an_endpoint_without_faults_passes(before: AuditReport) -> None:
    assert faults(before) == []
    assert before.numbers == "PASS"


def test_an_endpoint_without_faults_passes_with_lora_weights(served: Served) -> None:
    assert faults(served.audit(None, lora=LORA)) == []


@pytest.mark.parametrize(
    "refused",
    [
        ("return_token_ids",),
        ("return_token_ids", "prompt_logprobs"),
        ("return_token_ids", "prompt_logprobs", "echo"),
    ],
    ids=["no ids", "no prompt_logprobs", "no prompt rows"],
)
def test_an_endpoint_that_lacks_some_fields_passes(served: Served, refused: tuple[str, ...]) -> None:
    assert faults(served.audit(None, refused=refused)) == []


def test_an_endpoint_without_faults_of_processed_numbers_passes(served: Served, new_serving: Any) -> None:
    settings = ServerSettings(max_logprobs=-1, logprobs_mode="processed_logprobs")
    with new_serving(served.llm, settings) as (url, _), faulty(url, None) as address:
        assert faults(audit(Endpoint(address), served.llm, texts=TEXTS, quick=True)) == []


def test_nothing_changed_and_nothing_is_said_to_have(served: Served, before: AuditReport) -> None:
    assert faults(served.audit(None, before=before)) == []


def test_new_weights_that_are_served_are_no_fault(
    served: Served, before: AuditReport, new_serving: Any
) -> None:
    settings = ServerSettings(max_logprobs=-1, model_name="base")
    with new_serving(served.new, settings) as (url, _), faulty(url, None) as address:
        assert faults(audit(Endpoint(address), served.new, texts=TEXTS, before=before, quick=True)) == []


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - OF_TWO_AUDITS - OF_LORA - OF_CONFORMANCE))
def test_a_fault_is_named(served: Served, fault: str) -> None:
    check_named(served.audit(fault), fault)


@pytest.mark.parametrize("fault", sorted(OF_CONFORMANCE))
def test_a_fault_of_the_api_is_named_and_leaves_the_numbers_alone(served: Served, fault: str) -> None:
    check_named(served.check_conformance(fault), fault)
    assert served.audit(fault).numbers == "PASS"


def test_an_api_without_faults_conforms(served: Served) -> None:
    assert faults(served.check_conformance(None)) == []


def test_prompt_rows_of_the_base_model_are_named(served: Served) -> None:
    check_named(served.audit("lora_prompt", lora=LORA), "lora_prompt")


def test_old_rows_after_new_weights_are_named(served: Served, before: AuditReport) -> None:
    check_named(served.audit("stale_weights", llm=served.new, before=before), "stale_weights")


def test_other_rows_after_no_change_are_named(served: Served, before: AuditReport) -> None:
    check_named(served.audit("changed", before=before), "changed")
