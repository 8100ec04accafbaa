"""Programs of several steps, in SGLang's frontend language. Every step continues the previous one, so each token of a
program is computed once. See docs/dsl.md."""

from ..engine import Engine
from .backends import Backend, EngineBackend, HttpBackend, Runtime, RuntimeEndpoint
from .choices import (
    ChoicesDecision,
    ChoicesSamplingMethod,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from .default_backend import flush_cache, get_server_info, set_default_backend
from .errors import BackendError, ProgramError
from .expressions import (
    assistant,
    assistant_begin,
    assistant_end,
    beam,
    gen,
    gen_int,
    gen_string,
    role_message,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from .program import Program, function
from .refused import Anthropic, Crusoe, LiteLLM, OpenAI, VertexAI, image, video
from .state import ForkedStates, ProgramState

__all__ = [
    "Anthropic",
    "Backend",
    "BackendError",
    "ChoicesDecision",
    "ChoicesSamplingMethod",
    "Crusoe",
    "Engine",
    "EngineBackend",
    "ForkedStates",
    "HttpBackend",
    "LiteLLM",
    "OpenAI",
    "Program",
    "ProgramError",
    "ProgramState",
    "Runtime",
    "RuntimeEndpoint",
    "VertexAI",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "beam",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "image",
    "role_message",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]
