"""Workers as Python writes them, compiled by Numba to objects that need neither Numba nor Python.

A worker takes items from a counter that all threads share::

    @compiled_worker
    def worker(task):                                  # task: (TASK_FIELDS,) int64
        item = next_item(task)                         # each item in [0, num_items) exactly once
        while item >= 0:
            row = float32_at(task[2] + 4 * task[3] * item, task[3])
            for column in range(row.size):
                row[column] *= 2.0
            item = next_item(task)

    parallel_for(worker(), [rows.data_ptr(), num_columns], num_items=num_rows)

The numbers in the list arrive as `task[2:]`. Workers must not raise: check before the launch. Which thread
takes which item is not fixed, so an item's result must depend on the item alone. Scratch memory that a
worker makes with `np.empty` is its own.

Before it: the compiled loops. After it: `machine_code`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numba
from llvmlite import binding as llvm
from numba import cfunc, types

from logprobe.errors import EngineError
from logprobe.kernels.machine_code import ENTRY, LINKS_HERE
from logprobe.kernels.processor import cpu_name
from logprobe.kernels.threads.numba.intrinsics import internal
from logprobe.kernels.threads.numba.tasks import task_at
from logprobe.kernels.threads.parallel import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

OF_PYTHON = ("Py", "_Py", "NRT_", "numba_")  # begin names of functions that kernels must do without
# What Numba's runtime does for compiled code, as far as workers ask for it: the memory of arrays (`struct
# MemInfo` of its nrt.c: a count of references and, 24 bytes on, where the data lies). Who raises an error
# would first ask for the GIL; as no worker may raise, the process ends there.
RUNTIME = """
declare ptr @malloc(i64)
declare void @free(ptr)
declare void @abort() noreturn

define void @numba_gil_ensure(ptr %state) alwaysinline noreturn {
  call void @abort()
  unreachable
}

define ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align) {
  %alignment = zext i32 %align to i64
  %before = add i64 %alignment, 48
  %whole = add i64 %size, %before
  %info = call ptr @malloc(i64 %whole)
  %is_none = icmp eq ptr %info, null
  br i1 %is_none, label %none, label %some

some:
  %start = ptrtoint ptr %info to i64
  %end = add i64 %start, %before
  %mask = sub i64 0, %alignment
  %address = and i64 %end, %mask
  %data = inttoptr i64 %address to ptr
  store i64 1, ptr %info
  %place = getelementptr i8, ptr %info, i64 24
  store ptr %data, ptr %place
  ret ptr %info

none:  ; the caller asks for that
  ret ptr null
}

define void @NRT_MemInfo_call_dtor(ptr %info) {
  call void @free(ptr %info)
  ret void
}
"""


class Body:
    """The lines of a worker; called, it gives the worker, compiled here at the first call."""

    def __init__(self, body: Callable[[Any], None]) -> None:
        self._body = body
        self._worker: Worker | None = None
        self.__doc__ = body.__doc__

    def __call__(self) -> Worker:
        """The one worker of this process."""
        if self._worker is None:
            self._worker = Worker.of(self.machine_code())
        return self._worker

    def machine_code(self) -> bytes:
        """An object whose function `ENTRY`, `void(void*)`, runs the body."""
        body = internal(self._body)

        def start(address: Any) -> None:
            body(task_at(address))

        function = cfunc(types.void(types.voidptr))(start)
        return _object(function.inspect_llvm(), function.native_name)


def compiled_worker(body: Callable[[Any], None]) -> Body:
    """Make of a worker's body, `body(task)`, what gives the worker."""
    return Body(body)


def _object(text: str, name: str) -> bytes:
    """What LLVM's text of a function is compiled to, with `RUNTIME` in the place of Numba's own."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu_name(),
        features=os.environ.get("NUMBA_CPU_FEATURES") or llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static" if LINKS_HERE else "default",
        codemodel="large" if LINKS_HERE else "jitdefault",
    )
    module = llvm.parse_assembly(text)
    module.link_in(llvm.parse_assembly(RUNTIME))
    module.get_function(name).name = ENTRY
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != ENTRY:
            value.linkage = "internal"
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    asked = [value.name for value in module.functions if value.is_declaration]
    unknown = [name for name in asked if name.startswith(OF_PYTHON)]
    if unknown:
        remedy = "install another Numba, see docs/dependencies.md"
        raise EngineError(f"kernels of Numba {numba.__version__} ask for {', '.join(unknown)}; {remedy}")
    code: bytes = machine.emit_object(module)
    return code
