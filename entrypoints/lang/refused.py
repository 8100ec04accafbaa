"""SGLang's names that are not supported. They can be imported, so that programs which do not call them run; a call
raises an error that says what is missing, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

_NO_VISION = "the server has no vision models"
_OWN_SERVER = "programs run on Baton's own server or Engine; there are no backends for other vendors' APIs"


def _refused(name: str, why: str) -> Callable[..., NoReturn]:
    def call(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not supported: {why}")

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"SGLang's {name}: raises NotImplementedError."
    return call


image = _refused("image", _NO_VISION)
video = _refused("video", _NO_VISION)
Anthropic = _refused("Anthropic", _OWN_SERVER)
Crusoe = _refused("Crusoe", _OWN_SERVER)
LiteLLM = _refused("LiteLLM", _OWN_SERVER)
OpenAI = _refused("OpenAI", _OWN_SERVER)
VertexAI = _refused("VertexAI", _OWN_SERVER)
