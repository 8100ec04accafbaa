"""Routes that describe the model, the settings and the server's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from starlette.responses import Response

from ...runtime import metrics
from ...runtime.tokenizer_manager import TokenizerManager
from ..chat.chats import Chats
from ..description.json_schema import COUNT, Properties, answered, flag, nullable, open_object, string
from ..description.operation import Operation
from ..server_config import SECRETS, ServerArgs
from ..version import baton_version
from .route import GET, Route
from .wire.answers import JSONAnswer

_MODEL_INFO: Properties = {
    "model_path": string(),
    "tokenizer_path": string(),
    "served_model_name": string(),
    "is_generation": flag(),
    "context_length": nullable(COUNT),
    "vocab_size": nullable(COUNT),
    "dtype": nullable(string()),
    "device": nullable(string()),
    "chat_template": nullable(string()),
    "default_sampling_params": open_object("For what requests leave out, from generation_config.json."),
    "special_tokens": {},
}
_MODEL = Operation(summary="The model", answer=answered(_MODEL_INFO, title="ModelInfo"))
_SERVER = Operation(
    summary="Every setting but the keys, and the worker's report", answer=open_object(), refusals=(504,)
)
_VERSION = Operation(summary="Baton's version", answer=answered({"version": string()}, title="Version"))
_METRICS = Operation(summary="Metrics, for Prometheus", text="text/plain")


class InformationRoutes:
    def __init__(self, manager: TokenizerManager, chats: Chats, args: ServerArgs, defaults: Mapping[str, Any]) -> None:
        """defaults: sampling parameters for what requests leave out."""
        self._manager = manager
        self._defaults = dict(defaults)
        self._chats = chats
        self._args = args
        self.routes = [
            Route("/model_info", self.model_info, GET, operation=_MODEL),
            Route("/get_model_info", self.model_info, GET, operation=_MODEL),
            Route("/server_info", self.server_info, GET, operation=_SERVER),
            Route("/get_server_info", self.server_info, GET, operation=_SERVER),
            Route("/version", self.version, GET, operation=_VERSION),
            Route("/metrics", self.metrics, GET, "open", operation=_METRICS),
        ]

    async def model_info(self) -> Response:
        """Describe the model, with the chat template in use, so that a client can write roles piece by piece."""
        info = self._manager.worker_info
        return JSONAnswer(
            {
                "model_path": self._args.model.model_path,
                "tokenizer_path": self._args.tokenizer_path,
                "served_model_name": self._args.served_model_name,
                "is_generation": True,
                **{name: info.get(name) for name in ("context_length", "vocab_size", "dtype", "device")},
                "chat_template": self._chats.renderer.source or None,
                "default_sampling_params": self._defaults,
                "special_tokens": self._manager.tokenizer.special_tokens,
            }
        )

    async def server_info(self) -> Response:
        """Every setting but the API keys, and the worker's current report."""
        args = self._args
        parts = (args.model, args.scheduler, args.tiers, args.kv_events, args.server)
        settings = {name: value for part in parts for name, value in asdict(part).items()}
        for secret in (*SECRETS, "remote_cache_url"):  # the worker shows the URL without its password
            del settings[secret]
        settings["served_model_name"] = self._args.served_model_name
        settings["default_sampling_params"] = self._defaults
        worker = await self._manager.control.info()
        settings["max_total_num_tokens"] = worker.get("max_total_tokens")  # SGLang's name
        return JSONAnswer({**settings, "version": baton_version(), "internal_states": [worker]})

    async def version(self) -> Response:
        return JSONAnswer({"version": baton_version()})

    async def metrics(self) -> Response:
        return Response(self._manager.metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})
