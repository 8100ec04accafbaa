"""Baton: a radix-tree runtime for serving language models whose work comes in stages.

    from baton import Engine

    with Engine(model_path="examples/toy_model") as engine:
        print(engine.generate("The capital", {"temperature": 0, "max_new_tokens": 8})["text"])

This file is installed as the package ``baton``. It imports nothing by itself: ``Engine`` is imported when it is asked
for, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.entrypoints.engine import Engine

    __version__: str

__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from baton.entrypoints.engine import Engine

        return Engine
    if name == "__version__":
        from baton.entrypoints.version import baton_version

        return baton_version()
    raise AttributeError(f"module 'baton' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
