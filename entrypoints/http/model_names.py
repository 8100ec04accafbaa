"""The names of models that requests may use: the served model's, and those of its adapters.

model: NAME            the model, if it is its name, or if any name will do: without --served-model-name, and as long as
                       no adapter has been loaded, or with --serve-any-model-name
model: ADAPTER         the model with that adapter, as vLLM has it
model: NAME:ADAPTER    the same, as SGLang has it
lora_path: ADAPTER     the same; SGLang's name of the field
"""

from __future__ import annotations

from typing import Any

from ...runtime.lora.adapter_names import AdapterNames
from ...scheduler.outcome import RequestRefused
from ..fields.reading import shown
from ..server_config import ServerArgs


class ModelNames:
    """See the module docstring."""

    def __init__(self, args: ServerArgs, adapters: AdapterNames) -> None:
        self._served = args.served_model_name
        self._takes_any = args.server.serve_any_model_name
        self._is_named = bool(args.server.served_model_name)
        self._adapters = adapters

    def check(self, name: Any) -> None:
        """Refuse a ``model`` that is not served (404); None passes. See the module docstring for where any name does:
        once there are adapters, a mistyped name would get the answers of the model alone."""
        if name is None:
            return
        if not isinstance(name, str):
            raise RequestRefused(f"model is {shown(name)}; it takes a string", param="model")
        is_strict = not self._takes_any and (self._is_named or self._adapters.any_known)
        if self.adapter_of(name) is None and is_strict and name != self._served:
            raise self._unknown(name)

    def find_listed(self, name: str) -> str | None:
        """The adapter of a name in the list of models; None for the model itself. Raises RequestRefused (404)."""
        adapter = self.adapter_of(name)
        if adapter is None and not self._takes_any and name != self._served:
            raise self._unknown(name)
        return adapter

    def adapter_of(self, name: str) -> str | None:
        """The adapter that a ``model`` names; None if it names none. Raises RequestRefused (404) for one that is not
        loaded."""
        if name == self._served:
            return None
        if name in self._adapters:
            return name
        begins = name.startswith(f"{self._served}:")
        adapter = name[len(self._served) + 1 :] if begins else name
        if begins and adapter in self._adapters:
            return adapter
        if begins or self._adapters.was_unloaded(adapter):
            raise self._unknown(name)
        return None

    def name_adapter(self, fields: dict[str, Any]) -> None:
        """Put the adapter that ``model`` names into ``lora_path``. Raises RequestRefused; for an unknown name only once
        there are adapters, as the fields of some APIs have no ``model``."""
        model = fields.get("model")
        if not isinstance(model, str):
            return
        if self._adapters.any_known:
            self.check(model)
        adapter = self.adapter_of(model)
        if adapter is None:
            return
        given = fields.get("lora_path")
        if given not in (None, adapter):
            raise RequestRefused(
                f"model names the adapter {adapter!r} and lora_path is {shown(given)}; leave one of them out",
                param="lora_path",
            )
        fields["lora_path"] = adapter

    def shown_model(self, asked: Any) -> str:
        """The name that an answer gives to its model. asked: the request's ``model``."""
        if isinstance(asked, str) and asked != self._served and self._names_adapter(asked):
            return asked
        return self._served

    def _names_adapter(self, name: str) -> bool:
        return name in self._adapters or name.removeprefix(f"{self._served}:") in self._adapters

    def _unknown(self, name: str) -> RequestRefused:
        names = [self._served, *(adapter["name"] for adapter in self._adapters.described)]
        return RequestRefused(
            f"model {shown(name)} is not served here; this server has {', '.join(map(repr, names[:20]))}",
            code="model_not_found",
            param="model",
        )
