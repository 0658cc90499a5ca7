"""The wheel and source archive of `make test-wheel`, and the wheel installed in a fresh environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import logprobe
from logprobe.kernels.native import library

ROOT = Path(__file__).parents[2]
DATA = ["py.typed", "server/page/page.html", "server/page/page.css", "server/page/page.js"]
BUILD_FILES = {
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "THIRD_PARTY_NOTICES.md",
    "hatch_build.py",
    "pyproject.toml",
}
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def folder() -> Path:
    """The folder with the archives in `dist` and an environment with the wheel in `venv`."""
    if "RELEASE_FOLDER" not in os.environ:
        pytest.skip("RELEASE_FOLDER is not set: `make test-wheel` builds what is tested here")
    return Path(os.environ["RELEASE_FOLDER"])


@pytest.fixture(scope="module")
def wheel(folder: Path) -> zipfile.ZipFile:
    [path] = (folder / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def run(folder: Path, *words: str, text: str = "") -> str:
    """Run a command of the environment outside the repository, without its paths; return its output."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        [folder / "venv" / "bin" / words[0], *words[1:]],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=env,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "src"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    own = {path.relative_to(package).as_posix() for path in files}
    names = set(wheel.namelist())
    assert {f"logprobe/{name}" for name in DATA} <= own
    assert {name for name in names if ".dist-info/" not in name} == own


def test_the_wheel_says_its_version_licence_and_readme(wheel: zipfile.ZipFile) -> None:
    stem = f"logprobe-{logprobe.__version__}.dist-info"
    facts = message_from_string(wheel.read(f"{stem}/METADATA").decode())
    assert facts["Version"] == logprobe.__version__
    assert facts["License-Expression"] == "Apache-2.0"
    for name in (
        "LICENSE",
        "THIRD_PARTY_NOTICES.md",
        "native/licenses/zig.txt",
        "native/licenses/mingw-w64.txt",
    ):
        assert wheel.read(f"{stem}/licenses/{name}").decode() == (ROOT / name).read_text(encoding="utf-8")
    assert json.loads(wheel.read(f"{stem}/sboms/logprobe-native.cdx.json"))["bomFormat"] == "CycloneDX"
    readme = str(facts.get_payload())
    assert readme.strip().startswith("# logprobe")
    assert re.findall(r"\]\((?!https?:)", readme) == [], "an index cannot follow relative links"


def test_the_source_archive_holds_what_a_build_needs_and_no_more(folder: Path) -> None:
    [path] = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files", "src", "native"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    sources = {name for name in tracked.stdout.split() if not name.startswith("native/tests/")}
    assert sources - names == set()
    others = {name.partition("/")[0] for name in names} - {"src", "native"}
    assert others == {*BUILD_FILES, "PKG-INFO", ".gitignore"}


def test_the_command_tells_its_version(folder: Path) -> None:
    assert run(folder, "logprobe", "--version") == f"logprobe {logprobe.__version__}\n"


def test_the_package_runs_from_the_environment_alone(folder: Path) -> None:
    code = "import logprobe; print(logprobe.__file__)"
    assert run(folder, "python", "-c", code).startswith(str(folder / "venv"))
    assert run(folder, "python", "-m", "pip", "check").startswith("No broken requirements")


def test_the_kernels_of_the_wheel_run_where_those_of_this_checkout_do(folder: Path) -> None:
    code = "from logprobe.kernels.native import library; print(library().variant)"
    assert run(folder, "python", "-c", code).strip() == library().variant


@pytest.mark.real_model
def test_the_command_scores_a_text(folder: Path) -> None:
    scored = json.loads(run(folder, "logprobe", "score", "-", "--json", text=PARIS))
    paris = {row["token"]: row for row in scored["tokens"]}[" Paris"]
    assert paris["rank"] == 1
    assert paris["logprob"] == pytest.approx(-0.2581, abs=2e-3)
