"""``/flush_cache``: empties the prefix cache."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from ...runtime.tokenizer_manager import TokenizerManager
from ..fields.reading import refuse_unserved
from ..server_args import ServerArgs
from .route import GET_OR_POST, Route
from .transport import JSONAnswer, read_settings


class CacheRoutes:
    def __init__(self, manager: TokenizerManager, args: ServerArgs) -> None:
        self._control = manager.control
        self._args = args

    def routes(self) -> list[Route]:
        return [Route("/flush_cache", self.flush_cache, GET_OR_POST, "admin")]

    async def flush_cache(self, request: Request) -> Response:
        refuse_unserved(await read_settings(request, self._args.server.max_body_bytes), (), {}, (), where="")
        await self._control.flush_cache()
        return JSONAnswer({"success": True, "message": "the cache is empty"})
