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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, overload

from tqdm import tqdm

from .expressions import did_you_mean
from .interpreter import Interpreter
from .options import OPTION_NAMES, RunOptions, read_options, split_options, unknown_keyword
from .state import ProgramState

MAX_AUTO_THREADS = 64


@dataclass(frozen=True, slots=True)
class _Job:
    """One program of a batch."""

    position: int
    options: RunOptions
    args: tuple[Any, ...]
    arguments: dict[str, Any]

    @property
    def shown(self) -> str:
        return repr(self.arguments or self.args)


@overload
def function(func: Callable[..., Any], num_api_spec_tokens: None = None) -> Program: ...
@overload
def function(func: None = None, num_api_spec_tokens: None = None) -> Callable[[Callable[..., Any]], Program]: ...
def function(func: Callable[..., Any] | None = None, num_api_spec_tokens: None = None) -> Any:
    """Decorator, with or without parentheses, that makes a program of ``def name(s, …)``. Raises TypeError for a
    function that cannot be a program."""
    if num_api_spec_tokens is not None:
        raise ValueError("function: num_api_spec_tokens is not supported: it is for APIs that cannot continue a prompt")
    if func is None:
        return function
    if inspect.iscoroutinefunction(func):
        raise TypeError(f"{func.__name__} is async; write a plain function and call it with `await ….run_async()`")
    parameters = list(inspect.signature(func).parameters.values())
    if not parameters or parameters[0].kind not in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD):
        raise TypeError(f"{func.__name__} takes no state; its first parameter must be the state, usually `s`")
    return Program(func)


class Program:
    """See `function`. Called with a state it runs inside another program; called without, it is `run`."""

    def __init__(self, func: Callable[..., Any], bound: dict[str, Any] | None = None) -> None:
        self._func = func
        self._bound = bound or {}
        self._signature = inspect.signature(func)
        self._parameters = list(self._signature.parameters)[1:]
        """Without the state."""
        self.__name__ = func.__name__
        self.__doc__ = func.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], ProgramState):
            return self._func(*args, **{**self._bound, **kwargs})
        return self.run(*args, **kwargs)

    def bind(self, **arguments: Any) -> Program:
        """The same program with these arguments set."""
        for name in arguments:
            if name not in self._parameters:
                near = did_you_mean(name, self._parameters)
                raise TypeError(f"bind: {self.__name__} has no parameter {name!r}{near}")
        return Program(self._func, {**self._bound, **arguments})

    def trace(self, *_: Any, **__: Any) -> NoReturn:
        """SGLang's graph of a program's steps; raises NotImplementedError."""
        raise NotImplementedError("trace is not supported: programs run as they are written; there is no graph of them")

    def cache(self, *_: Any, **__: Any) -> NoReturn:
        """SGLang's way to compute the beginning of a program ahead; raises NotImplementedError."""
        raise NotImplementedError(
            "cache is not supported: the server caches shared text as programs run; to have a text computed ahead, "
            "use RuntimeEndpoint.cache_prefix(text)"
        )

    def run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the program and return its state.

        These keywords are options, all others the program's arguments: ``backend`` (an Engine, a URL, a Backend;
        default: `set_default_backend`), ``stream`` (return at once; read with `text_iter`), ``retain_ttl`` (seconds
        for which the server keeps a step's KV for the next one; default 5), and defaults for every gen:
        max_new_tokens, temperature, top_p, top_k, min_p, stop, seed, … A parameter of the program that has such a name
        and no value yet gets the keyword. Raises ProgramError if a step failed; with ``stream``, reading the state
        raises it.
        """
        state, arguments = self._prepare("run", args, kwargs)
        if state.streams:
            threading.Thread(target=self._run_for_readers, args=(state, args, arguments), daemon=True).start()
        else:
            self._run(state, args, arguments)
        return state

    async def run_async(self, *args: Any, **kwargs: Any) -> ProgramState:
        """`run` for asyncio: the program runs in its own thread. Cancelling aborts the steps in flight."""
        state, arguments = self._prepare("run_async", args, kwargs)
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
        generator_style: bool = False,
        **options: Any,
    ) -> Any:
        """Run the program for each item (its keywords or positional arguments); returns the states in the same order.

        num_threads: programs that run at a time; "auto" is 64. generator_style: return an iterator instead, which
        yields each state once it and those before it are done, and starts programs only while the next state is
        awaited. Other options as in `run`. The first program that fails stops the others, and its error is raised with
        a note that names its item.
        """
        for name in options.keys() - OPTION_NAMES:
            near = did_you_mean(name, OPTION_NAMES)
            raise TypeError(f"run_batch: {name} is not an option{near}; put arguments into the batch")
        if options.get("stream"):
            raise ValueError("run_batch waits for the programs; to stream, use run(stream=True) for each")
        if num_threads == "auto":
            num_threads = MAX_AUTO_THREADS
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; use 1 or more")
        jobs = []
        for item in batch:
            args, kwargs = ((), item) if isinstance(item, dict) else (tuple(item), {})
            of_item, arguments = self._split("run_batch", args, kwargs)
            jobs.append(_Job(len(jobs), read_options({**options, **of_item}), args, arguments))
        states = self._run_jobs(jobs, num_threads, progress_bar)
        return states if generator_style else list(states)

    def _run_jobs(self, jobs: Sequence[_Job], num_threads: int, progress_bar: bool) -> Iterator[ProgramState]:
        """The states of the jobs, in order. Leaving the iteration stops the programs that run."""
        running: dict[Future[None], tuple[_Job, ProgramState]] = {}
        done: dict[int, ProgramState] = {}
        waiting = deque(jobs)
        with (
            ThreadPoolExecutor(min(num_threads, max(1, len(jobs)))) as pool,
            tqdm(total=len(jobs), disable=not progress_bar) as bar,
        ):
            try:
                for position in range(len(jobs)):
                    while position not in done:
                        while waiting and len(running) < num_threads:
                            job = waiting.popleft()
                            state = ProgramState(Interpreter(job.options))
                            running[pool.submit(self._run, state, job.args, job.arguments)] = job, state
                        for future in wait(running, return_when=FIRST_COMPLETED).done:
                            job, state = running.pop(future)
                            if (error := future.exception()) is not None:
                                error.add_note(f"in program {job.position} of the batch: {job.shown:.200}")
                                raise error
                            done[job.position] = state
                            bar.update()
                    yield done.pop(position)
            except BaseException:
                for future, (_, state) in running.items():
                    future.cancel()
                    state.cancel()
                raise

    def _prepare(self, where: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[ProgramState, dict[str, Any]]:
        options, arguments = self._split(where, args, kwargs)
        return ProgramState(Interpreter(read_options(options))), arguments

    def _split(self, where: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Keywords -> (options, all keyword arguments of the program). Raises TypeError if the program does not take
        them."""
        missing = [name for name in self._parameters[len(args) :] if name not in self._bound]
        options, arguments = split_options(kwargs, missing)
        if not any(each.kind == each.VAR_KEYWORD for each in self._signature.parameters.values()):
            for name in arguments:
                if name not in self._parameters:
                    raise unknown_keyword(f"{self.__name__}.{where}", name, self._parameters)
        if twice := arguments.keys() & self._bound.keys():
            raise TypeError(f"{self.__name__}.{where}: {twice.pop()!r} is bound already, and given again")
        arguments = {**self._bound, **arguments}
        try:
            self._signature.bind(None, *args, **arguments)
        except TypeError as error:
            raise TypeError(f"{self.__name__}.{where}: {error}") from None
        return options, arguments

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
        with contextlib.suppress(Exception):  # the state has the error, and reading it raises it
            self._run(state, args, arguments)
