"""The build hook that compiles the native kernels; nothing is compiled here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

pytest.importorskip("hatchling", reason="hatchling is not installed: `make test-wheel` installs it")

HOOK = Path(__file__).parents[2] / "hatch_build.py"


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The hook's module, writing to `tmp_path/native`; neither a compiler nor zig is on the path."""
    spec = importlib.util.spec_from_file_location("hatch_build", HOOK)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "native")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ziglang", None)
    monkeypatch.setattr(module, "version_of", lambda _name: "1.2.3")
    for name in ("CXX", "LOGPROBE_TARGET"):
        monkeypatch.delenv(name, raising=False)
    return module


def program(folder: Path, name: str, script: str = "") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def built(hook: ModuleType, folder: Path) -> dict[str, Any]:
    """Run the hook and return the build data of the wheel, with the SBOM in place of its path."""
    data: dict[str, Any] = {"artifacts": []}
    metadata = SimpleNamespace(version="0.0.1")
    build = hook.NativeKernels(str(folder), {}, None, metadata, str(folder), "wheel")
    build.initialize("standard", data)
    [file] = data["sbom_files"]
    data["sbom_files"] = json.loads(Path(file).read_text("utf-8"))
    build.finalize("standard", data, "")
    assert not Path(file).exists()
    return data


def required(hook: ModuleType, folder: Path) -> list[str]:
    return list(hook.NativeKernels(str(folder), {}, None, None, str(folder), "wheel").dependencies())


def test_the_compiler_on_the_path_is_used_and_zig_required_without_one(
    hook: ModuleType, tmp_path: Path
) -> None:
    assert hook.local_compiler() is None
    assert required(hook, tmp_path) == [hook.CFFI, hook.ZIG]
    program(tmp_path, "c++")
    assert hook.local_compiler() == ["c++"]
    program(tmp_path, "g++")
    assert hook.local_compiler() == ["g++"]
    assert required(hook, tmp_path) == [hook.CFFI]


def test_cxx_comes_first_with_its_options(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "g++")
    program(tmp_path, "clang++-20")
    monkeypatch.setenv("CXX", "clang++-20 -stdlib=libc++")
    assert hook.local_compiler() == ["clang++-20", "-stdlib=libc++"]


def test_on_windows_only_cxx_is_used(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = program(tmp_path, "g++")
    monkeypatch.setattr(sys, "platform", "win32")
    assert hook.local_compiler() is None
    monkeypatch.setenv("CXX", path.as_posix())
    assert hook.local_compiler() == [path.as_posix()]


def test_another_target_is_compiled_by_zig(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "g++")
    monkeypatch.setenv("LOGPROBE_TARGET", "win_amd64")
    assert hook.local_compiler() is None
    assert required(hook, tmp_path) == [hook.CFFI, hook.ZIG]


@pytest.mark.parametrize(
    ("target", "system", "variants"),
    [
        ("manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28", {"v3", "v4"}),
        ("manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28", {"neon"}),
        ("macosx_11_0_arm64", "aarch64-macos.11.0", {"neon"}),
        ("win_amd64", "x86_64-windows-gnu", {"v3", "v4"}),
    ],
)
def test_a_target_names_the_wheel_and_its_libraries(
    hook: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    system: str,
    variants: set[str],
) -> None:
    commands: list[list[str]] = []

    def compile_nothing(command: list[Any]) -> None:
        commands.append([*map(str, command)])
        Path(command[command.index("-o") + 1]).touch()

    monkeypatch.setattr(hook, "run", compile_nothing)
    monkeypatch.setenv("LOGPROBE_TARGET", target)
    data = built(hook, tmp_path)
    bom = data.pop("sbom_files")
    assert bom["metadata"]["component"]["version"] == "0.0.1"
    parts = {part["name"]: part["licenses"][0]["expression"] for part in bom["components"]}
    assert parts["libc++"] == "Apache-2.0 WITH LLVM-exception"
    assert ("mingw-w64" in parts) == (target == "win_amd64")
    assert data == {
        "pure_python": False,
        "tag": f"py3-none-{target}",
        "artifacts": ["src/logprobe/kernels/_native/*"],
    }
    libraries = {f"kernels_{variant}.so" for variant in variants}
    assert {path.name for path in hook.FOLDER.iterdir()} == libraries | {"declarations.py", "sources.sha256"}
    assert {command[command.index("-target") + 1] for command in commands} == {system}

    commands.clear()  # nothing changed, so nothing is compiled
    built(hook, tmp_path)
    assert commands == []
    monkeypatch.setenv("LOGPROBE_TARGET", next(name for name in hook.TARGETS if name != target))
    built(hook, tmp_path)
    assert commands != []


def test_an_unknown_target_is_an_error_that_names_those_there_are(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGPROBE_TARGET", "win32")
    with pytest.raises(ValueError, match=r"LOGPROBE_TARGET.*manylinux_2_28_x86_64.*win_amd64.*'win32'"):
        built(hook, tmp_path)


def test_without_any_compiler_the_error_names_those_that_help(hook: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"g\+\+ or clang\+\+.*pip install 'ziglang"):
        built(hook, tmp_path)


def test_the_error_of_a_compiler_that_fails_holds_its_words(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path, "cxx", "echo 'unknown flag' >&2; exit 3")))
    with pytest.raises(RuntimeError, match=r"(?s)cxx -std=c\+\+17.* gave 3.*CXX.*unknown flag"):
        built(hook, tmp_path)
    assert not (hook.FOLDER / "sources.sha256").exists()


def test_a_build_keeps_the_old_libraries_until_all_are_compiled_and_open_files_stay_whole(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook.FOLDER.mkdir()
    old = hook.FOLDER / "kernels_v4.so"
    old.write_text("old")
    (hook.FOLDER / "kernels_neon.so").touch()  # of another target

    def compile_new(command: list[Any]) -> None:
        assert old.read_text() == "old"
        Path(command[command.index("-o") + 1]).write_text("new")

    monkeypatch.setattr(hook, "run", compile_new)
    monkeypatch.setenv("LOGPROBE_TARGET", "manylinux_2_28_x86_64")
    with old.open() as loaded:
        built(hook, tmp_path)
        assert loaded.read() == "old"
    assert old.read_text() == "new"
    names = {"kernels_v3.so", "kernels_v4.so", "declarations.py", "sources.sha256"}
    assert {path.name for path in hook.FOLDER.iterdir()} == names


def test_a_build_that_fails_leaves_the_old_libraries(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook.FOLDER.mkdir()
    (hook.FOLDER / "kernels_v4.so").write_text("old")
    monkeypatch.setenv("CXX", str(program(tmp_path, "cxx", "exit 1")))
    with pytest.raises(RuntimeError, match="do not compile"):
        built(hook, tmp_path)
    assert (hook.FOLDER / "kernels_v4.so").read_text() == "old"


def test_the_description_for_an_index_has_paths_in_place_of_relative_links(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("[scores](docs/scoring.md#texts), [vLLM](https://docs.vllm.ai)\n", encoding="utf-8")
    monkeypatch.setattr(hook, "README", readme)
    metadata: dict[str, Any] = {}
    hook.PackageReadme("", {}).update(metadata)
    assert metadata["readme"]["text"] == "scores (`docs/scoring.md`), [vLLM](https://docs.vllm.ai)\n"
    assert metadata["readme"]["content-type"] == "text/markdown"
