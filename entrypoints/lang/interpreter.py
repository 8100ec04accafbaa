"""Executes the steps of one state in order, in their own thread.

    program's thread   s += gen("a")      s += "text"     s["a"]   (waits)
                            │ submit           │             ▲
    state's thread      [queue] ──▶ roles ──▶ chain ──▶ text, variables

The program's thread queues steps and waits for results. After a failed step the others are skipped, and reading their
results raises the error.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...runtime.text.chat_template import ChatTemplateError
from .chain import Chain
from .errors import BackendError, ProgramError
from .ir import Beam, Gen, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Select, Step
from .options import RunOptions
from .role_texts import RoleTexts
from .text_stream import TextStream
from .thought_splitter import ThoughtSplitter

_ABORT_AGAIN_S = 0.2
"""Seconds between aborts. An abort can overtake the request it is meant for, so it is repeated until the step ends."""

_STOPPED = "the program was stopped"


class Variable:
    """The result of a named step. Empty until its step is done; then it holds a value and meta (the server's
    meta_info), or an error."""

    def __init__(self) -> None:
        self.stream = TextStream()
        self._value: Any = None
        self._meta: Any = None
        self._error: ProgramError | None = None
        self._done = threading.Event()

    def set_result(self, value: Any, meta: Any) -> None:
        """Set value and meta, which ends the step."""
        self._value, self._meta = value, meta
        self.stream.close()
        self._done.set()

    def set_error(self, error: ProgramError) -> None:
        """Set the error, unless the step is done."""
        if not self._done.is_set():
            self._error = error
            self.stream.close(error)
            self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def value(self) -> Any:
        """The value; waits for it. Raises ProgramError if the step failed or was skipped."""
        self._wait()
        return self._value

    def meta(self) -> Any:
        """The meta; waits and raises like `value`."""
        self._wait()
        return self._meta

    def _wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


@dataclass(slots=True, eq=False)
class _Task:
    label: str
    action: Callable[[], None]
    variables: tuple[Variable, ...] = ()
    done: threading.Event = field(default_factory=threading.Event)


class Interpreter:
    """Owns a state's thread, text, messages and variables."""

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.text = TextStream()
        self.messages: list[dict[str, str]] = []
        self.variables: dict[str, Variable] = {}
        self.error: ProgramError | None = None
        self._chain = Chain(options.backend, options.retain_ttl)
        self._roles: RoleTexts | None = None
        self._open_role: str | None = None
        """The open role after the last step submitted."""
        self._role_text = 0
        """Position in the text where the last message begins, including the template's text before its content."""
        self._scopes: dict[str, int] = {}
        """Position in the text where each open scope begins."""
        self._fork_text = 0
        self._fork_messages = 0
        """Length of the text, and number of messages, when this state was forked."""
        self._thread: threading.Thread | None = None
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._stopping = False
        self._idle = threading.Event()
        self._idle.set()
        self._declared = threading.Condition()

    # -- for the program's thread --------------------------------------------------------------------------------------

    def submit(self, step: Step) -> None:
        """Queue a step. Raises ValueError for a role inside a role, ProgramError if the state has ended or the program
        was stopped, as a program that never reads would not end otherwise."""
        self._check_open()
        if self._stopping:
            raise ProgramError(_STOPPED, code="stopped")
        match step:
            case str():
                self._put(_Task("text", lambda: self._write(step)))
            case Gen():
                variable = self._declare(step.name)
                if step.reasoning is None:
                    self._put(_Task(f"gen({step.name!r})", lambda: self._generate(step, variable), (variable,)))
                    return
                thought = self._declare(f"{step.name}_reasoning_content")
                action = lambda: self._reason(step, variable, thought)  # noqa: E731
                self._put(_Task(f"gen({step.name!r})", action, (variable, thought)))
            case Beam():
                variable = self._declare(step.name)
                self._put(_Task(f"beam({step.name!r})", lambda: self._search(step, variable), (variable,)))
            case Select():
                variable = self._declare(step.name)
                self._put(_Task(f"select({step.name!r})", lambda: self._select(step, variable), (variable,)))
            case RoleBegin(role):
                if self._open_role is not None:
                    raise ValueError(f"a {role} message begins inside a {self._open_role} message; end that one first")
                self._open_role = role
                self._put(_Task(f"{role} message", lambda: self._begin_role(role)))
            case RoleEnd(role):
                if self._open_role != role:
                    raise ValueError(f"a {role} message ends, but the open one is: {self._open_role or 'none'}")
                self._open_role = None
                self._put(_Task(f"{role} message", self._end_role))
            case ScopeBegin(name):
                self._put(_Task(f"var_scope({name!r})", lambda: self._begin_scope(name)))
            case ScopeEnd(name):
                variable = self._declare(name)
                self._put(_Task(f"var_scope({name!r})", lambda: self._end_scope(name, variable), (variable,)))

    def fork(self, count: int) -> list[Interpreter]:
        """``count`` states that continue from here, once all steps so far are done. Raises ProgramError."""
        forks: list[Interpreter] = []
        self._put(_Task("fork", lambda: forks.extend(self._fork() for _ in range(count)))).wait()
        if self.error is not None:
            raise self.error
        return forks

    def concatenate(self, forks: list[Interpreter]) -> None:
        """Append the additions of these forks of this state. Raises ProgramError."""
        self._put(_Task("join", lambda: self._concatenate(forks))).wait()
        if self.error is not None:
            raise self.error

    def sync(self) -> None:
        """Wait until all steps so far are done or skipped."""
        if not self._closed:
            self._put(_Task("sync", lambda: None)).wait()

    @property
    def is_stopping(self) -> bool:
        """True once steps that have not begun are skipped."""
        return self._stopping

    def variable(self, name: str, *, wait: bool = False) -> Variable:
        """The variable, done or not. Raises KeyError if no step so far has this name; with ``wait``, only if no step
        ever gets it."""
        is_own_step = threading.current_thread() is self._thread
        with self._declared:
            if wait and not is_own_step:
                self._declared.wait_for(lambda: name in self.variables or self._closed)
            if name not in self.variables:
                known = ", ".join(map(repr, self.variables)) or "none"
                raise KeyError(f"no step has the name {name!r}; named steps so far: {known}")
            variable = self.variables[name]
        if is_own_step and not variable.is_done:
            raise RuntimeError(f"{name!r} was read within a step of its own state, which would wait forever")
        return variable

    def set_variable(self, name: str, value: object, meta: object = None) -> None:
        self._declare(name).set_result(value, meta)

    def skip_rest(self) -> None:
        """Start no more steps. May be called from any thread."""
        self._stopping = True

    def stop(self) -> None:
        """Abort the step in flight and start no other; returns when nothing is in flight. From any thread; from the
        state's own it returns at once, as its step is in flight until then."""
        self.skip_rest()
        while not self._idle.is_set() and threading.current_thread() is not self._thread:
            self._chain.abort_step()
            self._idle.wait(_ABORT_AGAIN_S)

    def close(self, error: ProgramError | None = None) -> None:
        """Finish all queued steps, then release the leases on the server. ``error``: why the program itself failed."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._tasks.put(None)
        if self._thread is not None:
            self._thread.join()
        self._chain.close()
        self.error = error or self.error
        self.text.close(self.error)
        with self._declared:
            self._declared.notify_all()

    def _declare(self, name: str | None) -> Variable:
        variable = Variable()
        if name is not None:
            with self._declared:
                self.variables[name] = variable
                self._declared.notify_all()
        return variable

    def _put(self, task: _Task) -> threading.Event:
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a step of a state, such as a choices_method, cannot append to that state or wait for it"
            )
        with self._closing:
            try:
                self._check_open()
            except ProgramError as error:
                for variable in task.variables:
                    variable.set_error(error)
                raise
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="baton-program-state", daemon=True)
                self._thread.start()
            self._tasks.put(task)
        return task.done

    def _check_open(self) -> None:
        if self._closed:
            raise ProgramError("the state has ended, with its program or by join(): nothing can be appended")

    # -- the state's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._idle.clear()
            if self.error is None and self._stopping:
                self.error = ProgramError(_STOPPED, code="stopped")
            if self.error is None:
                self._attempt(task)
            self._idle.set()
            if self.error is not None:
                for variable in task.variables:
                    variable.set_error(self.error)
            task.done.set()

    def _attempt(self, task: _Task) -> None:
        try:
            task.action()
        except BackendError as error:
            code = "stopped" if self._stopping else error.code
            self.error = ProgramError(f"{task.label}: {error.message}", status=error.status, code=code)
            self.error.__cause__ = error
        except BaseException as error:  # of any kind, SystemExit too: the program waits for the result
            kind = "" if isinstance(error, ChatTemplateError) else f"{type(error).__name__}: "
            self.error = ProgramError(f"{task.label}: {kind}{error}")
            self.error.__cause__ = error

    def _write(self, text: str, *, from_template: bool = False) -> None:
        """Add text, which waits to be sent."""
        self._chain.append_text(text, from_template=from_template)
        self._show(text, is_content=not from_template)

    def _show(self, text: str, *, is_content: bool = True) -> None:
        """Show text to readers; it is also part of the open message, unless the template wrote it."""
        self.text.append_piece(text)
        if is_content and self._roles is not None and self._roles.is_open:
            self.messages[-1]["content"] += text

    def _begin_role(self, role: str) -> None:
        if self._roles is None:
            self._roles = RoleTexts(self.options.backend.chat_template())
        self._role_text = len(self.text.text)
        self._write(self._roles.begin_message(role), from_template=True)
        self.messages.append({"role": role, "content": ""})

    def _end_role(self) -> None:
        assert self._roles is not None
        self._write(self._roles.end_message(), from_template=True)

    def _generate(self, step: Gen, variable: Variable) -> None:
        shown = ""
        answers: list[dict] = []
        for answers in self._answers(step):
            text = answers[0]["text"]
            self._append_output(variable, text[len(shown) :], answers[0]["meta_info"])
            shown = text
        self._finish(variable, answers, [answer["text"] for answer in answers])

    def _reason(self, step: Gen, variable: Variable, thought: Variable) -> None:
        """Like `_generate`, with the thoughts taken out of the text. The chain continues the answer alone."""
        assert step.reasoning is not None
        splitter = ThoughtSplitter(step.reasoning, self.text.text[self._role_text :])
        answers: list[dict] = []
        for answers in self._answers(step, splitter):
            self._append_apart(splitter.split_next(answers[0]["text"]), variable, thought, answers[0]["meta_info"])
        self._append_apart(splitter.split_rest(), variable, thought, answers[0]["meta_info"])
        first = (variable.stream.text, thought.stream.text)
        if first[0] != answers[0]["text"]:
            self._chain.replace_last_output(first[0])
        apart = [first, *(splitter.split_whole(answer["text"]) for answer in answers[1:])]
        self._finish(variable, answers, [said for said, _ in apart])
        self._finish(thought, answers, [thoughts for _, thoughts in apart])

    def _answers(self, step: Gen, splitter: ThoughtSplitter | None = None) -> Iterator[list[dict]]:
        sampling = {**self.options.sampling, **step.sampling}
        if splitter is not None:
            sampling = splitter.after_thoughts(sampling)
            if splitter.keeps_special_tokens:
                sampling["skip_special_tokens"] = False
        return self._chain.generate_step(sampling, {**self.options.details, **step.options}, stream=self.options.stream)

    def _append_output(self, variable: Variable, piece: str, meta: Any = None) -> None:
        variable.stream.append_piece(piece, meta)
        self._show(piece)

    def _append_apart(self, new: tuple[str, str], variable: Variable, thought: Variable, meta: Any) -> None:
        answer, thoughts = new
        if thoughts:
            thought.stream.append_piece(thoughts, meta)
        self._append_output(variable, answer, meta)

    @staticmethod
    def _finish(variable: Variable, answers: list[dict], texts: list[str]) -> None:
        metas = [answer["meta_info"] for answer in answers]
        if len(texts) > 1:
            variable.set_result(texts, metas)
        else:
            variable.set_result(texts[0], metas[0])

    def _search(self, step: Beam, variable: Variable) -> None:
        sampling = {**self.options.search, **step.sampling}
        (answers,) = self._chain.generate_step(sampling, step.options, stream=False)
        texts = [answer["text"] for answer in answers]
        self._append_output(variable, texts[0])
        variable.set_result(texts, [answer["meta_info"] for answer in answers])

    def _select(self, step: Select, variable: Variable) -> None:
        choice = self._chain.choose_step(step.choices, step.method)
        meta = {
            **choice.answer["meta_info"],
            "choices": list(step.choices),
            "normalized_prompt_logprobs": choice.scores,
            "input_token_logprobs": choice.rows,
            "output_token_logprobs": [[] for _ in step.choices],
            **choice.details,
        }
        self._append_output(variable, choice.text, meta)
        variable.set_result(choice.text, meta)

    def _begin_scope(self, name: str) -> None:
        self._scopes[name] = len(self.text.text)

    def _end_scope(self, name: str, variable: Variable) -> None:
        text = self.text.text[self._scopes.pop(name) :]
        variable.stream.append_piece(text)
        variable.set_result(text, None)

    def _fork(self) -> Interpreter:
        other = Interpreter(self.options)
        other._chain = self._chain.fork()
        other.text.append_piece(self.text.text)
        other.messages = [dict(message) for message in self.messages]
        other.variables = dict(self.variables)
        other._roles = None if self._roles is None else self._roles.copy_roles()
        other._open_role = self._open_role
        other._role_text = self._role_text
        other._scopes = dict(self._scopes)
        other._fork_text, other._fork_messages = len(self.text.text), len(self.messages)
        return other

    def _concatenate(self, forks: list[Interpreter]) -> None:
        for fork in forks:
            is_open = fork._open_role is not None
            if is_open and (self._open_role is None or len(fork.messages) > fork._fork_messages):
                raise ProgramError(
                    f"a fork ends inside a {fork._open_role} message; end it before the forks are joined"
                )
            if self._open_role is not None and not is_open:
                raise ProgramError(f"a fork has ended the {self._open_role} message, which is open here; fork after it")
        for fork in forks:
            self._show(fork.text.text[fork._fork_text :])
            self.messages += [dict(message) for message in fork.messages[fork._fork_messages :]]
            if fork._roles is not None:
                if self._roles is None:
                    self._roles = fork._roles.copy_roles()
                else:
                    self._roles.append_messages(fork._roles, fork._fork_messages)
        self._chain.concatenate([fork._chain for fork in forks])
