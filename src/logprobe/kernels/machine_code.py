"""Machine code of kernels: objects as compilers write them, kept on the disk and linked into this process.

An object asks for nothing but functions of the C library, so a start needs neither Numba nor LLVM: of an ELF
object of x86-64 with addresses of 64 bits ("large" code model), linking is to copy its sections and to write
the addresses in (System V ABI, AMD64 supplement, 4.4). Objects of other kinds are linked by LLVM.

Before it: what `threads.numba.workers` compiles. After it: the workers.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import mmap
import os
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from platform import machine
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from platformdirs import user_cache_path

from logprobe.kernels.processor import machine_key
from logprobe.private_files import is_private, make_folder, write_private

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger("logprobe")
ENTRY: Final = "worker"  # the one function of an object that is asked for
DIGEST_BYTES: Final = 32  # before an object: a file that was cut off must never run
LIBRARIES: Final = ("numba", "llvmlite")
LINKS_HERE: Final = sys.platform == "linux" and machine() == "x86_64"
# The ELF format's own names and numbers (gABI, "Object Files").
_HEADER: Final = np.dtype(
    {"names": ["shoff", "shnum"], "formats": ["<u8", "<u2"], "offsets": [40, 60], "itemsize": 64}
)
_SECTION: Final = np.dtype(
    {
        "names": ["type", "flags", "offset", "size", "link", "info", "addralign"],
        "formats": ["<u4", "<u8", "<u8", "<u8", "<u4", "<u4", "<u8"],
        "offsets": [4, 8, 24, 32, 40, 44, 48],
        "itemsize": 64,
    }
)
_SYMBOL: Final = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("shndx", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_RELOCATION: Final = np.dtype([("offset", "<u8"), ("type", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])
SHT_SYMTAB, SHT_RELA, SHT_UNWIND, SHF_ALLOC, SHN_UNDEF, R_64 = 2, 4, 0x70000001, 2, 0, 1


def linked(code: bytes) -> tuple[int, Any]:
    """The address of an object's `ENTRY`, in memory that may be executed, and the owner of that memory.

    Raises:
        OSError: the system does not let memory be made executable.
    """
    return _linked_here(code) if LINKS_HERE else linked_by_llvm(code)


def _linked_here(code: bytes) -> tuple[int, Any]:
    header = np.frombuffer(code, _HEADER, 1)[0]
    sections = np.frombuffer(code, _SECTION, header["shnum"], header["shoff"])
    table = next(section for section in sections if section["type"] == SHT_SYMTAB)
    symbols, names = _table(code, table, _SYMBOL), int(sections[table["link"]]["offset"])
    is_kept = (sections["flags"] & SHF_ALLOC != 0) & (sections["type"] != SHT_UNWIND)
    places: dict[int, int] = {}
    size = 0
    for number in np.flatnonzero(is_kept).tolist():
        places[number] = size + -size % max(1, int(sections[number]["addralign"]))
        size = places[number] + int(sections[number]["size"])
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for number, place in places.items():
        start, count = int(sections[number]["offset"]), int(sections[number]["size"])
        memory[place : place + count] = code[start : start + count]

    def name_of(symbol: Any) -> str:
        start = names + int(symbol["name"])
        return code[start : code.index(b"\0", start)].decode()

    def address_of(symbol: Any) -> int:
        if symbol["shndx"] == SHN_UNDEF:
            return c_function(name_of(symbol))
        return base + places[int(symbol["shndx"])] + int(symbol["value"])

    for section in sections[sections["type"] == SHT_RELA]:
        if int(section["info"]) not in places:
            continue
        for relocation in _table(code, section, _RELOCATION):
            assert relocation["type"] == R_64, "code compiled for 64 bits has no other"
            address = address_of(symbols[relocation["symbol"]]) + int(relocation["addend"])
            place = places[int(section["info"])] + int(relocation["offset"])
            memory[place : place + 8] = address.to_bytes(8, "little")
    entry = next(address_of(symbol) for symbol in symbols if name_of(symbol) == ENTRY)
    _protect(base, size)
    return entry, memory


def _table(code: bytes, section: Any, kind: np.dtype[np.void]) -> NDArray[np.void]:
    return np.frombuffer(code, kind, int(section["size"]) // kind.itemsize, int(section["offset"]))


def _protect(address: int, size: int) -> None:
    """Let memory be read and executed, and no longer written."""
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if protect(address, size, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        number = ctypes.get_errno()
        remedy = "allow it to this program (SELinux: execmem; systemd: MemoryDenyWriteExecute=no)"
        reason = os.strerror(number)
        raise OSError(
            number, f"kernels cannot be loaded: memory cannot be made executable ({reason}); {remedy}"
        )


@functools.cache
def c_function(name: str) -> int:
    """The address of a function of the C library or of its mathematics."""
    address = ctypes.cast(ctypes.CDLL(None)[name], ctypes.c_void_p).value
    assert address is not None
    return address


def linked_by_llvm(code: bytes) -> tuple[int, Any]:
    """The same by LLVM's own linker: for objects of other kinds, and the twin of `linked`."""
    from llvmlite import binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine.get_function_address(ENTRY), engine


class StoredCode:
    """Where a kernel's machine code lies, or will lie: of these sources, libraries and this processor."""

    def __init__(self, name: str) -> None:
        self._name = f"{name}-{_key()}.o"

    def is_there(self) -> bool:
        """Whether there is a file."""
        return any(
            (folder / self._name).is_file() and is_private(folder / self._name) for folder in _folders()
        )

    def read(self) -> bytes | None:
        """The object; None where there is no whole file."""
        for folder in _folders():
            if not is_private(folder / self._name):
                continue
            with suppress(OSError):
                content = (folder / self._name).read_bytes()
                digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
                if _digest(code) == digest:
                    return code
        return None

    def write(self, code: bytes) -> None:
        """Keep an object, whole or not at all, where a folder can be written to."""
        if (folder := folder_to_write()) is None:
            return
        try:
            write_private(folder / self._name, _digest(code) + code, mode=0o644)  # all users of an install
        except OSError as error:
            logger.warning("%s cannot be kept, and is compiled in every process: %s", self._name, error)


def folder_to_write() -> Path | None:
    """The first of the folders that can be written to; None where there is none."""
    for folder in _folders():
        with suppress(OSError):
            make_folder(folder, 0o755)
            if os.access(folder, os.W_OK):
                return folder
    return None


def _folders() -> list[Path]:
    """`$NUMBA_CACHE_DIR`, or one beside the sources and one of the user's."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(chosen)]
    users = user_cache_path("logprobe", appauthor=False, opinion=False)
    return [Path(__file__).parent / "__pycache__", users / "kernels"]


def _digest(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=DIGEST_BYTES).digest()


@functools.cache
def _key() -> str:
    """Of all that machine code comes from: a file that anything else has left is never read."""
    made_by = [sys.platform, *machine_key(), *map(version, LIBRARIES)]
    digest = hashlib.blake2b(repr(made_by).encode(), digest_size=8)
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
