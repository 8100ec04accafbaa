"""``/flush_cache``: empties the prefix cache."""

from __future__ import annotations

from starlette.responses import Response

from ...runtime.tokenizer_manager import TokenizerManager
from .route import GET_OR_POST, Route
from .transport import JSONAnswer


class CacheRoutes:
    def __init__(self, manager: TokenizerManager) -> None:
        self._control = manager.control

    def routes(self) -> list[Route]:
        return [Route("/flush_cache", self.flush_cache, GET_OR_POST)]

    async def flush_cache(self) -> Response:
        await self._control.flush_cache()
        return JSONAnswer({"success": True, "message": "the cache is empty"})
