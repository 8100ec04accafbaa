"""``/cache/tiers``: where cached prefixes are. ``/flush_cache``: forgets them."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from ...runtime.tokenizer_manager import TokenizerManager
from ..description.json_schema import open_object, taken
from ..description.operation import SUCCESS, Operation
from ..fields.reading import refuse_unserved
from .route import GET, GET_OR_POST, Route
from .wire.bodies import Bodies
from .wire.transport import JSONAnswer

_TIERS = Operation(
    summary="What each tier of the KV cache holds and has done", tag="Cache", answer=open_object(), refusals=(504,)
)
_FLUSH = Operation(
    summary="Empty the cache",
    about="GET is for old clients, and needs a key.",
    tag="Cache",
    body=taken({}),
    body_is_optional=True,
    answer=SUCCESS,
    refusals=(405, 409, 504),
)


class CacheRoutes:
    def __init__(self, manager: TokenizerManager, bodies: Bodies) -> None:
        self._control = manager.control
        self._bodies = bodies

    def routes(self) -> list[Route]:
        return [
            Route("/cache/tiers", self.tiers, GET, operation=_TIERS),
            Route("/flush_cache", self.flush_cache, GET_OR_POST, "admin", operation=_FLUSH),
        ]

    async def tiers(self) -> Response:
        """What each tier of the KV cache holds and has done."""
        return JSONAnswer(await self._control.tiers())

    async def flush_cache(self, request: Request) -> Response:
        async with self._bodies.settings(request) as given:
            refuse_unserved(given, (), {}, (), where="")
        await self._control.flush_cache()
        return JSONAnswer({"success": True, "message": "the cache is empty"})
