"""Check a release on this machine: archives, licences, SBOM, and the tests on the installed wheel.

`make release-check` runs it. Without `--dist`, the source archive and this platform's wheel are built first.
For each Python, the wheel is installed with the extra `test` in an environment outside of this folder, and
the quick tests run on a copy of the repository without its `src`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from email import message_from_string
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
QUICK = "not real_model and not slow and not exhaustive and not fuzz"
TOOLS = ["build>=1.3", "twine>=6.1", "check-wheel-contents>=0.6.1", "cyclonedx-bom>=7"]
NOTICES = {"LICENSE", "THIRD_PARTY_NOTICES.md", "native/licenses/zig.txt", "native/licenses/mingw-w64.txt"}
TREE = ["deploy", "docs", "examples", "benchmarks", "release", "tests"]  # what the tests read
# These read or check the source tree, which the wheel does not have.
OF_THE_TREE = ["tests/docs", "tests/release", "tests/evaluators", "tests/typing"]
PLATFORMS = {
    ("linux", "x86_64"): "manylinux_2_28_x86_64",
    ("linux", "aarch64"): "manylinux_2_28_aarch64",
    ("darwin", "arm64"): "macosx_11_0_arm64",
    ("win32", "AMD64"): "win_amd64",
}


def run(*command: Any, **options: Any) -> None:
    """Run a command; exits with an error if it fails."""
    print("$", *command, flush=True)
    own = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    if subprocess.run([*map(str, command)], check=False, env=own, **options).returncode:
        sys.exit(f"error: {command[0]} failed")


def require(is_so: object, message: str) -> None:
    """Exit with an error if something is missing."""
    if not is_so:
        sys.exit(f"error: {message}")


def environment(folder: Path, python: str | None = None) -> Path:
    """Create a virtual environment and return the path of its Python."""
    if python is None:
        venv.create(folder, with_pip=True)
    else:
        run(python, "-m", "venv", folder)
    return next(path for name in ("bin/python", "Scripts/python.exe") if (path := folder / name).exists())


def build(tools: Path, dist: Path) -> None:
    """Build the source archive, and from it the wheel of this platform."""
    run(tools, "-m", "build", "--outdir", dist, ROOT)


def check_metadata(tools: Path, dist: Path) -> None:
    """Check the metadata of all archives and the contents of the wheels."""
    archives = sorted(dist.glob("logprobe-*"))
    run(tools, "-m", "twine", "check", "--strict", *archives)
    run(tools, "-m", "check_wheel_contents", "--toplevel", "logprobe", *dist.glob("*.whl"))


def check_wheel(path: Path) -> None:
    """Check that a wheel has its libraries, licences, third-party notices and SBOM."""
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        info = metadata.removesuffix("METADATA")
        facts = message_from_string(wheel.read(metadata).decode())
        boms = [json.loads(wheel.read(name)) for name in names if name.startswith(f"{info}sboms/")]
    missing = {f"{info}licenses/{name}" for name in NOTICES} - names
    require(not missing, f"{path.name} lacks {', '.join(sorted(missing))}")
    require(facts["License-Expression"] == "Apache-2.0", f"{path.name} states another licence")
    variants = {"neon"} if path.stem.endswith(("arm64", "aarch64")) else {"v3", "v4"}
    libraries = {f"logprobe/kernels/_native/kernels_{name}.so" for name in variants}
    require(libraries <= names, f"{path.name} lacks {', '.join(sorted(libraries - names))}")
    is_cross = any(path.stem.endswith(tag) for tag in PLATFORMS.values())
    require(boms, f"{path.name} has no SBOM")
    parts = {component["name"] for bom in boms for component in bom["components"]}
    require("libc++" in parts or not is_cross, f"{path.name}: its SBOM does not name zig's libraries")
    require(("mingw-w64" in parts) == path.stem.endswith("win_amd64"), f"{path.name}: SBOM and mingw-w64")
    print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {len(names)} files", flush=True)


def check_sdist(path: Path) -> None:
    """Check that the source archive builds, and has neither tests nor results nor libraries."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = NOTICES | {"CHANGELOG.md", "README.md", "hatch_build.py", "native/kernels.h"}
    require(missing <= names, f"{path.name} lacks {', '.join(sorted(missing - names))}")
    extra = [name for name in names if name.startswith(("tests/", "benchmarks/")) or "_native" in name]
    require(not extra, f"{path.name} has {', '.join(sorted(extra)[:3])}")
    print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {len(names)} files", flush=True)


def own_wheel(dist: Path) -> Path:
    """Return the wheel for this machine: the one of a release, or one built here."""
    tag = PLATFORMS.get((sys.platform, platform.machine()), "none")
    found = [*dist.glob(f"*{tag}.whl"), *dist.glob(f"*-py3-none-{sys.platform}*.whl")]
    require(found, f"{dist} has no wheel for this machine")
    return found[0]


def bill_of_materials(tools: Path, python: Path, output: Path) -> None:
    """Write the CycloneDX list of an environment's packages, and check that it names the wheel's."""
    output.parent.mkdir(parents=True, exist_ok=True)
    run(
        *(tools, "-m", "cyclonedx_py", "environment", python, "--pyproject", ROOT / "pyproject.toml"),
        *("--output-reproducible", "--spec-version", "1.6", "--output-file", output),
    )
    names = {component["name"] for component in json.loads(output.read_text("utf-8"))["components"]}
    require({"numpy", "tokenizers", "safetensors"} <= names, f"{output} does not list the dependencies")


def copy_of_the_tree(folder: Path) -> Path:
    """Copy what the tests read, without the package's source."""
    for name in TREE:
        skip = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    for file in ROOT.iterdir():
        if file.is_file() and file.suffix in {".md", ".toml", ".yml", ""} and file.name != ".git":
            shutil.copy(file, folder)
    return folder


def test(python: Path, wheel: Path, tree: Path, paths: list[str]) -> None:
    """Install the wheel with the test tools, and run the quick tests on the installed package."""
    run(python, "-m", "pip", "install", "--quiet", f"logprobe[test] @ {wheel.resolve().as_uri()}")
    run(python, "-m", "pip", "check")
    code = (
        "import logprobe, sys; print(logprobe.__file__); sys.exit('site-packages' not in logprobe.__file__)"
    )
    run(python, "-c", code, cwd=tree)
    skipped = [f"--ignore={name}" for name in OF_THE_TREE]
    options = ["-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", "-m", QUICK, *skipped]
    run(python, "-m", "pytest", *options, *paths, cwd=tree)


def main() -> None:
    """Run all checks; `--sbom FILE` writes the SBOM of the wheel's environment and stops there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dist", type=Path, help="folder with the archives of a release; default: build them"
    )
    parser.add_argument(
        "--pythons", nargs="+", default=[sys.executable], help="such as python3.11 python3.14"
    )
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files and folders; default: all")
    parser.add_argument("--sbom", type=Path, help="write the SBOM here instead of running the tests")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        tools = environment(folder / "tools")
        run(tools, "-m", "pip", "install", "--quiet", *TOOLS)
        dist = options.dist or folder / "dist"
        if options.dist is None:
            build(tools, dist)
        check_metadata(tools, dist)
        for path in sorted(dist.glob("*.whl")):
            check_wheel(path)
        check_sdist(next(iter(dist.glob("*.tar.gz"))))
        wheel = own_wheel(dist)
        plain = environment(folder / "plain")
        run(plain, "-m", "pip", "install", "--quiet", wheel)
        bill_of_materials(tools, plain, options.sbom or folder / "logprobe.cdx.json")
        if options.sbom is None:
            tree = copy_of_the_tree(folder / "tree")
            for number, python in enumerate(options.pythons):
                test(environment(folder / f"venv{number}", python), wheel, tree, options.tests)
    print(f"release check: passed in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
