"""Programs: functions of a state, and the ways to run them.

@function
def capital(s, country):
    s += f"The capital of {country} is"
    s += gen("city", max_tokens=4, stop=".")

state = capital.run(country="France", backend="http://localhost:30000")
print(state["city"])
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, Literal

from tqdm import tqdm

from .interpreter import Interpreter
from .options import OPTION_NAMES, split_options
from .state import ProgramState

MAX_AUTO_THREADS = 64


def function(func: Callable[..., Any]) -> Program:
    """Decorator: makes a program of ``def name(s, …)``. Raises TypeError for a function that cannot be one."""
    if inspect.iscoroutinefunction(func):
        raise TypeError(f"{func.__name__} is async; write a plain function and call it with `await ….run_async()`")
    parameters = list(inspect.signature(func).parameters.values())
    if not parameters or parameters[0].kind not in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD):
        raise TypeError(f"{func.__name__} takes no state; its first parameter must be the state, usually `s`")
    if taken := OPTION_NAMES & {parameter.name for parameter in parameters}:
        names = ", ".join(sorted(taken))
        raise TypeError(f"{func.__name__} has the parameter {names}, which is an option of run(); rename it")
    return Program(func)


class Program:
    """See `function`. Calling it with a state runs it inside another program."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self._func = func
        self.__name__ = func.__name__
        self.__doc__ = func.__doc__

    def __call__(self, state: ProgramState, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, ProgramState):
            raise TypeError(f"{self.__name__}(…) runs inside a program, with its state first; elsewhere use run()")
        return self._func(state, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the program and return its state.

        These keywords are options, all others the program's arguments: ``backend`` (an Engine, a URL, a Backend;
        default: `set_default_backend`), ``stream`` (return at once; read with `text_iter`), ``retain_ttl`` (seconds
        for which the server keeps a step's KV for the next one; default 5), and defaults for every gen:
        max_new_tokens, temperature, top_p, top_k, min_p, stop, seed, … Raises ProgramError if a step failed; with
        ``stream``, reading the state raises it.
        """
        state, arguments = self._prepare(kwargs)
        if state.streams:
            threading.Thread(target=self._run_for_readers, args=(state, args, arguments), daemon=True).start()
        else:
            self._run(state, args, arguments)
        return state

    async def run_async(self, *args: Any, **kwargs: Any) -> ProgramState:
        """`run` for asyncio: the program runs in its own thread. Cancelling aborts the steps in flight."""
        state, arguments = self._prepare(kwargs)
        if state.streams:
            raise ValueError("run_async waits for the program; to stream, call run(stream=True) and text_async_iter()")
        future: Future[ProgramState] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self._run(state, args, arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(state)

        threading.Thread(target=run, daemon=True).start()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            threading.Thread(target=state.cancel, daemon=True).start()  # it waits for the server
            raise

    def run_batch(
        self,
        batch: Sequence[dict[str, Any] | Sequence[Any]],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        **options: Any,
    ) -> list[ProgramState]:
        """Run the program for each item (its keywords or positional arguments); returns the states in the same order.

        num_threads: programs that run at a time; "auto" is 64. Other options as in `run`. The first program that fails
        stops the others, and its error is raised with a note that says which item it was.
        """
        if unknown := options.keys() - OPTION_NAMES:
            raise TypeError(f"run_batch: {', '.join(sorted(unknown))} is no option; arguments belong into the batch")
        if options.get("stream"):
            raise ValueError("run_batch waits for the programs; to stream, use run(stream=True) for each")
        if num_threads == "auto":
            num_threads = MAX_AUTO_THREADS
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; use 1 or more")
        jobs = [self._prepare({**options, **(item if isinstance(item, dict) else {})}) for item in batch]
        positional = [() if isinstance(item, dict) else tuple(item) for item in batch]
        with ThreadPoolExecutor(min(num_threads, max(1, len(jobs)))) as pool:
            futures = {
                pool.submit(self._run, state, args, arguments): position
                for position, ((state, arguments), args) in enumerate(zip(jobs, positional))
            }
            try:
                for future in tqdm(as_completed(futures), total=len(futures), disable=not progress_bar):
                    if (error := future.exception()) is not None:
                        error.add_note(f"in program {futures[future]} of the batch: {batch[futures[future]]!r:.200}")
                        raise error
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for state, _ in jobs:
                    state.cancel()
                raise
        return [state for state, _ in jobs]

    def _prepare(self, kwargs: dict[str, Any]) -> tuple[ProgramState, dict[str, Any]]:
        options, arguments = split_options(kwargs)
        return ProgramState(Interpreter(options)), arguments

    def _run(self, state: ProgramState, args: Sequence[Any], arguments: dict[str, Any]) -> None:
        state._begin()
        try:
            state.ret_value = self._func(state, *args, **arguments)
            state._finish_steps()  # in here, so that Ctrl-C while they run aborts them
        except BaseException as failure:
            state._end(failure)
            raise
        state._end()

    def _run_for_readers(self, state: ProgramState, args: Sequence[Any], arguments: dict[str, Any]) -> None:
        with contextlib.suppress(Exception):  # the state has the error, and gives it to whoever reads
            self._run(state, args, arguments)
