"""Lets SGLang's clients and tests import without the packages of its server.

They name constants and types of `sglang.srt` that calls over HTTP never use; the modules behind these would load
torchvision, compressed-tensors and more. `install` has such a module found as an empty one.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

SERVER_ONLY = ("sglang.srt.disaggregation", "sglang.srt.entrypoints")


class _EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname, path, target=None):
        if any(fullname == name or fullname.startswith(f"{name}.") for name in SERVER_ONLY):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _EmptyModule(spec.name)

    def exec_module(self, module) -> None:
        pass


def install() -> None:
    sys.meta_path.insert(0, _Finder())
