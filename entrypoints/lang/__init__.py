"""Programs of several steps, in the style of SGLang's frontend language. Every step continues the previous one, so each
token of a program is computed once. See docs/dsl.md."""

from .backends import Backend, EngineBackend, HttpBackend
from .errors import BackendError, ProgramError
from .ir import (
    assistant,
    assistant_begin,
    assistant_end,
    beam,
    gen,
    role_message,
    select,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from .options import set_default_backend
from .program import Program, function
from .state import ForkedStates, ProgramState

__all__ = [
    "Backend",
    "BackendError",
    "EngineBackend",
    "ForkedStates",
    "HttpBackend",
    "Program",
    "ProgramError",
    "ProgramState",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "beam",
    "function",
    "gen",
    "role_message",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "user",
    "user_begin",
    "user_end",
]
