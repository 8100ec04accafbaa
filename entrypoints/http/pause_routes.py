"""SGLang's ``/pause_generation`` and ``/continue_generation``."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from ...runtime.tokenizer_manager import TokenizerManager
from ...scheduler.outcome import RequestRefused
from ..description.json_schema import answered, enum, list_of, string, taken
from ..description.operation import Operation
from ..fields.reading import one_of, refuse_unserved
from .route import POST, Route
from .wire.answers import JSONAnswer
from .wire.bodies import Bodies

_PAUSE = Operation(
    summary="Launch no step from now on",
    about="Open requests end (abort), or stay where they are (in_place); new ones wait.",
    body=taken({"mode": enum("abort", "in_place", default="abort")}, title="PauseBody"),
    body_is_optional=True,
    answer=answered({"status": string(), "message": string(), "aborted": list_of(string("rid"))}, title="Paused"),
    refusals=(504,),
)
_RESUME = Operation(
    summary="Go on after a pause",
    body=taken({}),
    body_is_optional=True,
    answer=answered({"status": string(), "message": string()}, title="Resumed"),
    refusals=(504,),
)


class PauseRoutes:
    def __init__(self, manager: TokenizerManager, bodies: Bodies) -> None:
        self._manager = manager
        self._bodies = bodies
        self.routes = [
            Route("/pause_generation", self.pause, POST, "admin", operation=_PAUSE),
            Route("/continue_generation", self.resume, POST, "admin", operation=_RESUME),
        ]

    async def pause(self, request: Request) -> Response:
        """Launch no step from now on. ``mode`` says what becomes of the open requests: they end (abort, SGLang's
        default), or stay where they are (in_place). New ones wait."""
        async with self._bodies.settings(request) as given:
            refuse_unserved(given, ("mode",))
        mode = "abort" if given.get("mode") is None else given["mode"]
        if mode == "retract":
            raise RequestRefused(
                "mode retract is not supported; use in_place, which keeps what is computed, or abort",
                code="unsupported_field",
                param="mode",
            )
        one_of(mode, ("abort", "in_place"), "mode")
        await self._manager.control.pause()
        aborted = self._manager.abort_all() if mode == "abort" else []
        return JSONAnswer({"status": "ok", "message": "paused", "aborted": aborted})

    async def resume(self, request: Request) -> Response:
        """Go on. No error where nothing was paused."""
        async with self._bodies.settings(request) as given:
            refuse_unserved(given, ())
        await self._manager.control.resume()
        return JSONAnswer({"status": "ok", "message": "running"})
