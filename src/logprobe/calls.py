"""Methods that `LLM` and `AsyncLLM` share: written once as coroutines, blocking in `LLM`.

`coroutine_method` and `generator_method` are descriptors. On a subclass of `Blocking`, a method runs on the
model's event loop thread and returns its result; on any other class it is the coroutine function (or async
generator) as written. In both cases, type checkers, `help` and `inspect.signature` see the signature and
docstring of the coroutine function.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
    from concurrent.futures import Future

    from logprobe.engine.backends.bridge import LoopThread

P = ParamSpec("P")
T = TypeVar("T")


class Blocking:
    """A class whose methods block until there is a result."""

    _bridge: LoopThread  # runs the coroutines


class Async:
    """A class whose methods are coroutines and async generators."""


class coroutine_method(Generic[P, T]):  # noqa: N801 - a decorator
    """Make a coroutine function a method that blocks in subclasses of `Blocking`."""

    def __init__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None:
        @wraps(function)
        def blocking(model: Any, /, *args: P.args, **options: P.kwargs) -> T:
            result: T = model._bridge.run(function(model, *args, **options))  # noqa: SLF001 - `Blocking`
            return result

        self._blocking, self._coroutine = blocking, function

    @overload
    def __get__(self, model: Blocking, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, model: Async, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, model: None, owner: type[Blocking]) -> Callable[Concatenate[Any, P], T]: ...
    @overload
    def __get__(self, model: None, owner: type) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]: ...
    def __get__(self, model: Any, owner: type) -> Any:
        function = self._blocking if issubclass(owner, Blocking) else self._coroutine
        return function if model is None else MethodType(function, model)


class generator_method(Generic[P, T]):  # noqa: N801 - a decorator
    """Make an async generator function a method that is a plain generator in subclasses of `Blocking`."""

    def __init__(self, function: Callable[Concatenate[Any, P], AsyncGenerator[T]]) -> None:
        @wraps(function)
        def blocking(model: Any, /, *args: P.args, **options: P.kwargs) -> Generator[T]:
            items: Generator[T] = model._bridge.iterate(function(model, *args, **options))  # noqa: SLF001 - `Blocking`
            return items

        signature = inspect.signature(function)
        returns = str(signature.return_annotation).replace("AsyncGenerator", "Generator")
        blocking.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
        self._blocking, self._generator = blocking, function

    @overload
    def __get__(self, model: Blocking, owner: type) -> Callable[P, Generator[T]]: ...
    @overload
    def __get__(self, model: Async, owner: type) -> Callable[P, AsyncGenerator[T]]: ...
    @overload
    def __get__(self, model: None, owner: type[Blocking]) -> Callable[Concatenate[Any, P], Generator[T]]: ...
    @overload
    def __get__(self, model: None, owner: type) -> Callable[Concatenate[Any, P], AsyncGenerator[T]]: ...
    def __get__(self, model: Any, owner: type) -> Any:
        function = self._blocking if issubclass(owner, Blocking) else self._generator
        return function if model is None else MethodType(function, model)


class Waiter:
    """Runs coroutines on an event loop for a function that runs on another thread.

    Cancelling `run_in_thread` ends the function at its next call of `wait`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()
        self._is_cancelled = False

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result; call this from the other thread."""
        with self._lock:
            if self._is_cancelled:
                work.close()
                raise asyncio.CancelledError
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._running.add(future)
        try:
            return future.result()
        finally:
            with self._lock:
                self._running.discard(future)

    async def run_in_thread(self, function: Callable[[], T]) -> T:
        """Run a blocking function on a worker thread and return its result."""
        try:
            return await asyncio.to_thread(function)
        finally:
            with self._lock:
                self._is_cancelled = True
                for future in self._running:
                    future.cancel()
