"""LoRA adapters: load one under a name, list them, unload one. SGLang's paths; vLLM's below /v1."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from ...runtime.tokenizer_manager import TokenizerManager
from ...scheduler.outcome import RequestRefused
from ..description.json_schema import answered, flag, list_of, open_object, string, taken
from ..description.openapi import Operation
from ..fields.reading import refuse_unserved, typed
from ..server_config import ServerArgs
from .route import GET, POST, Route
from .wire.answers import JSONAnswer
from .wire.bodies import Bodies

_ADAPTER = open_object("Its name, path, rank, num_modules and num_bytes.")
_LOADED = answered(
    {"success": flag(), "loaded_adapters": open_object("Path of each adapter, by name.")}, title="LoadedAdapters"
)
_NAME = string("The name that requests use.", least=1)
_OFF = {"pinned": (False, True), "load_inplace": (False,), "is_3d_lora_weight": (False,)}
"""Fields of other servers that are accepted with these values only, since all loaded adapters stay on the device."""

_NUMBER: dict[str, tuple] = {"lora_int_id": ()}
"""vLLM's other way to name an adapter."""

_LOAD = Operation(
    summary="Load a LoRA adapter",
    about="The folder is on the server's machine, in peft's format.",
    tag="Adapters",
    body=taken(
        {"lora_name": _NAME, "lora_path": string("Folder of the adapter.", least=1)},
        title="LoadAdapterBody",
        required=("lora_name", "lora_path"),
        unsupported=_OFF,
    ),
    answer=_LOADED,
    refusals=(504,),
)
_UNLOAD = Operation(
    summary="Unload a LoRA adapter",
    about="Later requests cannot use it; open ones finish with it.",
    tag="Adapters",
    body=taken({"lora_name": _NAME}, title="UnloadAdapterBody", required=("lora_name",), unsupported=_NUMBER),
    answer=_LOADED,
    refusals=(404, 504),
)
_LIST = Operation(summary="List the LoRA adapters", tag="Adapters", answer=answered({"adapters": list_of(_ADAPTER)}))


class AdapterRoutes:
    def __init__(self, manager: TokenizerManager, args: ServerArgs, bodies: Bodies) -> None:
        self._control = manager.control
        self._served = args.served_model_name
        self._bodies = bodies
        self.routes = [
            *(Route(path, self.load_adapter, POST, "admin", operation=_LOAD)
              for path in ("/load_lora_adapter", "/v1/load_lora_adapter")),
            *(Route(path, self.unload_adapter, POST, "admin", operation=_UNLOAD)
              for path in ("/unload_lora_adapter", "/v1/unload_lora_adapter")),
            Route("/lora_adapters", self.list_adapters, GET, operation=_LIST),
        ]  # fmt: skip

    async def load_adapter(self, request: Request) -> Response:
        async with self._bodies.json_object(request) as fields:
            refuse_unserved(fields, ("lora_name", "lora_path"), _OFF)
            name, path = (typed(fields.get(field), str, field) for field in ("lora_name", "lora_path"))
        if name == self._served:
            raise RequestRefused(f"lora_name {name!r} is the name of the model itself", param="lora_name")
        await self._control.load_adapter(name, path)
        return self._loaded()

    async def unload_adapter(self, request: Request) -> Response:
        async with self._bodies.json_object(request) as fields:
            refuse_unserved(fields, ("lora_name",), _NUMBER)
            name = typed(fields.get("lora_name"), str, "lora_name")
        await self._control.unload_adapter(name)
        return self._loaded()

    async def list_adapters(self) -> Response:
        return JSONAnswer({"adapters": [dict(adapter) for adapter in self._control.adapters.described]})

    def _loaded(self) -> Response:
        paths = {adapter["name"]: adapter["path"] for adapter in self._control.adapters.described}
        return JSONAnswer({"success": True, "loaded_adapters": paths})
