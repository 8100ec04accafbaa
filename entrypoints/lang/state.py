"""The state that a program appends to and reads from, and the group of states that `fork` makes from it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Literal

from . import ir
from .errors import ProgramError
from .expressions import role_message
from .interpreter import Interpreter
from .ir import Expr, steps_of
from .text_stream import TextStream


class ProgramState:
    """``s += …`` queues steps and returns at once; reading waits. The steps of one state run in order; forks run side
    by side. A step's error is raised by `run`, and where its result is read."""

    def __init__(self, interpreter: Interpreter, *, parent: ProgramState | None = None) -> None:
        self._interpreter = interpreter
        self._forks: list[ProgramState] = []
        """All forks that come from this program's root state; every state shares the same list."""
        self._error_was_read = False
        self._program_thread: threading.Thread | None = None
        self.ret_value: Any = None
        """The return value of the program's function."""
        if parent is not None:
            self._forks = parent._forks
            self._forks.append(self)

    # -- appending -----------------------------------------------------------------------------------------------------

    def __iadd__(self, expr: Expr | str) -> ProgramState:
        for step in steps_of(expr):
            self._interpreter.submit(step)
        return self

    def system(self, expr: Expr | str | None = None) -> Any:
        """Append a system message; without an argument, use it as ``with s.system(): s += …``."""
        return self.role("system", expr)

    def user(self, expr: Expr | str | None = None) -> Any:
        return self.role("user", expr)

    def assistant(self, expr: Expr | str | None = None) -> Any:
        return self.role("assistant", expr)

    def role(self, role: str, expr: Expr | str | None = None) -> Any:
        """Append a message of any role that the chat template knows."""
        if expr is None:
            return self._message(role)
        self += role_message(role, expr)
        return None

    @contextlib.contextmanager
    def _message(self, role: str) -> Iterator[None]:
        self._interpreter.submit(ir.RoleBegin(role))
        yield
        self._interpreter.submit(ir.RoleEnd(role))

    # -- reading -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """``with s.var_scope("x"): s += …`` makes the text appended inside, roles included, the variable ``x``."""
        self._interpreter.submit(ir.ScopeBegin(name))
        yield
        self._interpreter.submit(ir.ScopeEnd(name))

    def set_var(self, name: str, value: Any) -> None:
        """Set a variable to any value; nothing is appended. ``s[name] = value`` is the same."""
        self._interpreter.set_variable(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __getitem__(self, name: str) -> Any:
        """The text of the step ``name``, once it is done; a list for n > 1, a `beam`, or after `join`.

        Raises KeyError for an unknown name, ProgramError if the step failed.
        """
        with self._reading():
            return self._variable(name).value()

    def __contains__(self, name: str) -> bool:
        return name in self._interpreter.variables

    def get_var(self, name: str) -> Any:
        return self[name]

    def meta(self, name: str) -> Any:
        """The server's meta_info of the step ``name``: finish_reason, prompt_tokens, cached_tokens, … and, for every
        step after the first, ``continuation`` {path, inherited_tokens, recomputed_tokens, trimmed_tokens}.

        A list of them for n > 1 and for a `beam`; a beam's results have ``sequence_score`` and
        ``cumulative_logprob``."""
        with self._reading():
            return self._variable(name).meta()

    def get_meta_info(self, name: str) -> Any:
        return self.meta(name)

    def text(self) -> str:
        """All the text so far, roles included, once the steps so far are done. Raises ProgramError if one failed."""
        self.sync()
        return self._interpreter.text.text

    def messages(self) -> list[dict[str, str]]:
        """The messages so far, as {role, content}; waits and raises like `text`."""
        self.sync()
        return [dict(message) for message in self._interpreter.messages]

    def __str__(self) -> str:
        return f"ProgramState({self.text()})"

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text, or the step ``var_name``'s, in pieces as they arrive; token by token with ``run(…, stream=True)``.
        Raises ProgramError after the last piece if a step failed."""
        with self._reading():
            yield from self._stream(var_name).follow()

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """`text_iter` for asyncio. With ``return_meta_data`` it yields (piece, the step's meta so far); the last piece
        may be empty, and has the whole meta."""
        if return_meta_data and var_name is None:
            raise ValueError("text_async_iter: return_meta_data needs var_name; the whole text has no meta")
        with self._reading():
            # The name may be declared later, so wait for it in a thread, not on the loop.
            stream = self._interpreter.text if var_name is None else await asyncio.to_thread(self._stream, var_name)
            async for item in stream.follow_with_meta() if return_meta_data else stream.follow_async():
                yield item

    def error(self) -> ProgramError | None:
        """The error of the step that failed, once the steps so far are done; None if none failed."""
        self._wait()
        if self._interpreter.error is not None:
            self._error_was_read = True
        return self._interpreter.error

    def sync(self) -> None:
        """Wait until all steps so far are done; from outside a running program, until the program ends. Raises
        ProgramError if one failed."""
        if (error := self.error()) is not None:
            raise error

    # -- forks ---------------------------------------------------------------------------------------------------------

    def fork(self, size: int = 1, position_ids_offset: None = None) -> ForkedStates:
        """``size`` states that continue from here, with copies of the variables. Text that this state has not sent yet
        is computed once for all of them. Raises ProgramError if an earlier step failed."""
        if position_ids_offset is not None:
            raise ValueError("fork: position_ids_offset is not supported; forks continue at the next position")
        if size < 1:
            raise ValueError(f"fork: size is {size}; use 1 or more")
        with self._reading():
            forks = self._interpreter.fork(size)
        states = [ProgramState(fork, parent=self) for fork in forks]
        if self._interpreter.is_stopping:  # `cancel` may not have seen them
            for state in states:
                state._interpreter.skip_rest()
        return ForkedStates(self, states)

    @contextlib.contextmanager
    def copy(self, position_ids_offset: None = None) -> Iterator[ProgramState]:
        """``with s.copy() as other: other += …`` is a fork of one, joined at the end: each of its new variables is a
        list of one value in ``s``."""
        with self.fork(1, position_ids_offset) as forks:
            yield forks[0]

    # -- for program.py ----------------------------------------------------------------------------

    @property
    def streams(self) -> bool:
        return self._interpreter.options.stream

    def _begin(self) -> None:
        """The program runs in the current thread."""
        self._program_thread = threading.current_thread()

    def _finish_steps(self) -> None:
        for state in (*self._forks, self):
            state._interpreter.sync()

    def _end(self, failure: BaseException | None = None) -> None:
        """Called when the program's function has ended: finish all steps, or stop them after a ``failure``, and release
        all leases. Raises a step's error that has not been read yet."""
        if failure is not None:
            self.cancel()
        error = None
        if failure is not None:
            error = failure if isinstance(failure, ProgramError) else ProgramError(f"the program failed: {failure!r}")
        for fork in self._forks:
            fork._interpreter.close()
            if not fork._error_was_read:
                error = error or fork._interpreter.error
        self._interpreter.close(error)
        if failure is None and self._interpreter.error is not None:
            raise self._interpreter.error

    def cancel(self) -> None:
        """Abort the steps in flight here and in all forks, and skip later ones. May be called from any thread."""
        while going := [each for each in (self, *self._forks) if not each._interpreter.is_stopping]:
            for state in going:  # the program may fork meanwhile
                state._interpreter.skip_rest()
        for state in (self, *self._forks):
            state._interpreter.stop()

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for the steps so far."""
        if self._is_outside():
            with contextlib.suppress(ProgramError):
                for _ in self._interpreter.text.follow():
                    pass
        self._interpreter.sync()

    def _is_outside(self) -> bool:
        # Readers of a streaming program may ask for a name before its step is queued. Inside the program, waiting for
        # it would never end.
        is_root = self not in self._forks
        return self.streams and is_root and threading.current_thread() is not self._program_thread

    def _variable(self, name: str) -> Any:
        return self._interpreter.variable(name, wait=self._is_outside())

    def _stream(self, name: str | None) -> TextStream:
        return self._interpreter.text if name is None else self._variable(name).stream

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except ProgramError:
            self._error_was_read = True
            raise


class ForkedStates:
    """The states that `fork` made. ``with s.fork(2) as forks: …`` joins them at its end."""

    def __init__(self, source: ProgramState, states: list[ProgramState]) -> None:
        self._source = source
        self._known = set(source._interpreter.variables)
        self.states = states

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, position: int) -> ProgramState:
        return self.states[position]

    def __setitem__(self, position: int, state: ProgramState) -> None:
        # Python writes the result of ``forks[i] += …`` back.
        if state is not self.states[position]:
            raise TypeError("a fork cannot be replaced; append to it with +=")

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __iadd__(self, expr: Expr | str | Sequence[Expr | str] | Callable[[int], Expr | str]) -> ForkedStates:
        """Append to every state: the same expression, one each from a list, or a function's result for its position."""
        if callable(expr):
            expr = [expr(position) for position in range(len(self))]
        elif isinstance(expr, Expr | str):
            expr = [expr] * len(self)
        if len(expr) != len(self):
            raise ValueError(f"{len(expr)} expressions for {len(self)} forks; give one for each")
        for state, one in zip(self.states, expr):
            state += one
        return self

    def __enter__(self) -> ForkedStates:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.join()

    def join(self, mode: Literal["gather_variable", "concate_and_append"] = "gather_variable") -> None:
        """Wait for all forks and end them. Each variable that is new in them becomes a list in the source state, with
        one value per fork that has it. Raises ProgramError if a step of a fork failed.

        mode: "concate_and_append" appends the text of all forks to the source state instead, one after the other. If
        nothing was appended there since the fork, it continues from the first fork, which is not computed again.
        """
        if mode not in ("gather_variable", "concate_and_append"):
            raise ValueError(f"join: mode is {mode!r}; use 'gather_variable' or 'concate_and_append'")
        for state in self.states:
            state.sync()
        if mode == "concate_and_append":
            with self._source._reading():
                self._source._interpreter.concatenate([state._interpreter for state in self.states])
        for state in self.states:
            state._interpreter.close()
        if mode == "gather_variable":
            self._gather()

    def _gather(self) -> None:
        names = dict.fromkeys(name for state in self.states for name in state._interpreter.variables)
        for name in names:
            if name not in self._known:
                found = [state for state in self.states if name in state]
                values, metas = [state[name] for state in found], [state.meta(name) for state in found]
                self._source._interpreter.set_variable(name, values, metas)
