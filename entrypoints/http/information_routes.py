"""Routes that describe the model, the settings and the server's state."""

from __future__ import annotations

from dataclasses import asdict

from starlette.responses import Response

from ...runtime import metrics
from ...runtime.tokenizer_manager import TokenizerManager
from ..chat.chats import Chats
from ..server_args import SECRETS, ServerArgs
from ..version import baton_version
from .route import GET, Route
from .wire.transport import JSONAnswer


class InformationRoutes:
    def __init__(self, manager: TokenizerManager, chats: Chats, args: ServerArgs) -> None:
        self._manager = manager
        self._chats = chats
        self._args = args

    def routes(self) -> list[Route]:
        return [
            Route("/model_info", self.model_info, GET),
            Route("/get_model_info", self.model_info, GET),
            Route("/server_info", self.server_info, GET),
            Route("/get_server_info", self.server_info, GET),
            Route("/version", self.version, GET),
            Route("/metrics", self.metrics, GET, "open"),
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
                "special_tokens": self._manager.tokenizer.special_tokens,
            }
        )

    async def server_info(self) -> Response:
        """Every setting but the API keys, and the worker's current report."""
        args = self._args
        settings = {**asdict(args.model), **asdict(args.scheduler), **asdict(args.tiers), **asdict(args.server)}
        for secret in (*SECRETS, "remote_cache_url"):  # the worker shows the URL without its password
            del settings[secret]
        settings["served_model_name"] = self._args.served_model_name
        worker = await self._manager.control.info()
        return JSONAnswer({**settings, "version": baton_version(), "internal_states": [worker]})

    async def version(self) -> Response:
        return JSONAnswer({"version": baton_version()})

    async def metrics(self) -> Response:
        return Response(self._manager.metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})
