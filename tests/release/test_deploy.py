"""The variables, metrics, files and times named in deploy/ and docs/deploy.md exist."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer
import yaml

import logprobe
from logprobe.cli.app import make_app
from logprobe.kernels.native import VARIABLE
from logprobe.server import ServerSettings
from logprobe.server.http.shutdown import LAST_S
from logprobe.server.metrics import PROCESSOR_COUNTERS, Metrics

if TYPE_CHECKING:
    from logprobe import LLM

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
UNIT = (ROOT / "deploy" / "logprobe.service").read_text(encoding="utf-8")
COMPOSE_TEXT = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
KUBERNETES = (ROOT / "deploy" / "kubernetes.yaml").read_text(encoding="utf-8")
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
COMPOSE = yaml.safe_load(COMPOSE_TEXT)
SERVICE = COMPOSE["services"]["server"]
POD = next(part for part in yaml.safe_load_all(KUBERNETES) if part["kind"] == "Deployment")["spec"][
    "template"
]["spec"]


def variables() -> set[str]:
    """Return the environment variables of `logprobe serve` and of the library."""
    serve = typer.main.get_command(make_app(["serve"])).commands["serve"]  # type: ignore[attr-defined]
    own = {str(param.envvar) for param in serve.params if param.envvar}
    return own | {"LOGPROBE_HOME", VARIABLE, "LOGPROBE_TARGET"}  # the last: of the build hook


@pytest.mark.parametrize(
    "text",
    [PAGE, DOCKERFILE, UNIT, COMPOSE_TEXT, KUBERNETES],
    ids=["page", "image", "unit", "compose", "kubernetes"],
)
def test_every_variable_is_one_that_the_server_reads(text: str) -> None:
    named = set(re.findall(r"\bLOGPROBE_[A-Z_]*[A-Z]\b", text))
    assert named - {"LOGPROBE_NAME"} - variables() == set()


@pytest.mark.parametrize("name", ["docs/deploy.md", "deploy/alerts.yaml", "deploy/dashboard.json"])
def test_every_figure_that_is_named_is_one_of_the_servers(name: str, tiny_llm: LLM) -> None:
    own = {f"logprobe_processor_{name}_total" for name in PROCESSOR_COUNTERS}
    figures = asyncio.run(Metrics(lambda: {"": tiny_llm.engine}).text()).decode()
    own |= set(re.findall(r"^# TYPE (\w+)", figures, re.MULTILINE))
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"\b(logprobe_[a-z_]+?)(?:_bucket)?\b(?!:)", text))
    assert len(named) > 4
    assert named - own == set()


def test_the_rules_are_such_that_prometheus_takes_them() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool here (Debian's package prometheus), which checks the rules")
    command = [promtool, "check", "rules", ROOT / "deploy" / "alerts.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_example_has_prometheus_read_the_metrics_with_a_key_of_a_file() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yaml").read_text(encoding="utf-8"))
    [job] = config["scrape_configs"]
    assert job["job_name"] == "logprobe"  # the name in the alerting rules
    assert set(job["authorization"]) == {"credentials_file"}  # its type defaults to Bearer
    assert job.get("metrics_path", "/metrics") == "/metrics"
    assert [(ROOT / "deploy" / name).name for name in config["rule_files"]] == ["alerts.yaml"]


def test_prometheus_takes_the_example(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool here (Debian's package prometheus), which checks the example")
    for name in ("prometheus.yaml", "alerts.yaml"):
        shutil.copy(ROOT / "deploy" / name, tmp_path)
    (tmp_path / "logprobe.key").write_text("a-key-of-a-client", encoding="utf-8")
    command = [promtool, "check", "config", tmp_path / "prometheus.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_has_a_title_and_a_question_for_each_picture() -> None:
    board = json.loads((ROOT / "deploy" / "dashboard.json").read_text(encoding="utf-8"))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) >= 8
    assert all(panel["title"] and all(one["expr"] for one in panel["targets"]) for panel in board["panels"])


def test_those_who_stop_the_server_wait_longer_than_it_drains() -> None:
    waits = [int(SERVICE["stop_grace_period"].removesuffix("s"))]
    waits += [int(seconds) for seconds in re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)]
    [container] = POD["containers"]
    waits.append(POD["terminationGracePeriodSeconds"] - container["lifecycle"]["preStop"]["sleep"]["seconds"])
    assert len(waits) == 3
    assert min(waits) > ServerSettings().drain_s + LAST_S


def test_the_image_is_of_this_version_and_made_of_files_that_are_let_in() -> None:
    assert SERVICE["image"] == POD["containers"][0]["image"] == f"logprobe:{logprobe.__version__}"
    build = SERVICE["build"]
    assert (ROOT / "deploy" / build["context"] / build["dockerfile"]).samefile(ROOT / "deploy" / "Dockerfile")
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    copied = {
        name
        for line in re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE)
        for name in line.split()
    }
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)


def test_the_containers_run_confined_as_another_user() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
    user = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert [str(POD["securityContext"]["runAsUser"])] == user
    assert POD["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", DOCKERFILE, re.MULTILINE)
    assert stages[-1] == ("server", "cpu")  # the default image


def test_prometheus_of_the_containers_has_the_name_and_the_key_of_the_server() -> None:
    config = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])
    [job] = config["scrape_configs"]
    assert job["job_name"] == "logprobe"
    assert job["authorization"]["credentials_file"] == "/run/secrets/key"
    assert COMPOSE["secrets"]["key"]["environment"] == "LOGPROBE_API_KEY"
    [[target]] = [static["targets"] for static in job["static_configs"]]
    assert target.partition(":")[0] in SERVICE["environment"]["LOGPROBE_ALLOWED_HOST"]


def test_the_probes_of_the_pod_ask_routes_of_the_server() -> None:
    [container] = POD["containers"]
    asked = {
        name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")
    }
    assert asked == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    verifier = shutil.which("systemd-analyze")
    if verifier is None:
        pytest.skip("there is no systemd-analyze here, which checks the unit")
    unit = tmp_path / "logprobe.service"
    # The command need not be installed; any program will do.
    unit.write_text(UNIT.replace("/opt/logprobe/bin/logprobe", sys.executable), encoding="utf-8")
    done = subprocess.run([verifier, "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_an_issue_form_asks_for_something(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert form["blank_issues_enabled"] is True
        assert all(link.keys() == {"name", "url", "about"} for link in form["contact_links"])
        return
    assert {"name", "description", "body"} <= set(form)
    kinds = [part["type"] for part in form["body"]]
    assert set(kinds) <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) > 1
    assert all(field["attributes"]["label"] for field in fields)
