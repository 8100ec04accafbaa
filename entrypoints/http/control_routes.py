"""Routes that control the worker: pause and continue generation, and profile its steps. SGLang's paths."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from ...runtime.tokenizer_manager import TokenizerManager
from ...scheduler.outcome import RequestRefused
from ..description.json_schema import SUCCESS, answered, enum, list_of, open_object, string, taken
from ..description.openapi import Operation
from ..fields.reading import one_of, refuse_unserved
from .route import POST, Route
from .wire.answers import JSONAnswer
from .wire.bodies import Bodies

_PAUSE = Operation(
    summary="Pause: launch no further steps",
    about="Open requests are aborted (abort) or stay as they are (in_place); new ones wait.",
    body=taken({"mode": enum("abort", "in_place", default="abort")}, title="PauseBody"),
    body_is_optional=True,
    answer=answered({"status": string(), "message": string(), "aborted": list_of(string("rid"))}, title="Paused"),
    refusals=(504,),
)
_RESUME = Operation(
    summary="Resume after a pause",
    body=taken({}),
    body_is_optional=True,
    answer=answered({"status": string(), "message": string()}, title="Resumed"),
    refusals=(504,),
)

_PROFILE_SETTINGS: dict[str, tuple] = {
    "activities": (["CPU", "GPU"],),
    "profile_by_stage": (False,),
    **dict.fromkeys(("output_dir", "start_step", "num_steps", "with_stack", "record_shapes", "merge_profiles"), ()),
}
"""Settings of SGLang's profiler, which writes torch traces; ours only measures times."""

_BODY = taken({}, title="ProfileBody", unsupported=_PROFILE_SETTINGS)
_START = Operation(
    summary="Record where steps spend their time",
    tag="Profile",
    body=_BODY,
    body_is_optional=True,
    answer=SUCCESS,
    refusals=(409, 504),
)
_STOP = Operation(
    summary="Stop recording, and return the report",
    tag="Profile",
    body=_BODY,
    body_is_optional=True,
    answer=open_object(),
    refusals=(409, 504),
)


class ControlRoutes:
    def __init__(self, manager: TokenizerManager, bodies: Bodies) -> None:
        self._manager = manager
        self._bodies = bodies
        self.routes = [
            Route("/pause_generation", self.pause, POST, "admin", operation=_PAUSE),
            Route("/continue_generation", self.resume, POST, "admin", operation=_RESUME),
            Route("/start_profile", self.start_profile, POST, "admin", operation=_START),
            Route("/stop_profile", self.stop_profile, POST, "admin", operation=_STOP),
        ]

    async def pause(self, request: Request) -> Response:
        """Launch no further steps. ``mode``: open requests are aborted (abort, SGLang's default) or stay as they are
        (in_place). New ones wait."""
        async with self._bodies.settings(request) as given:
            refuse_unserved(given, ("mode",))
        mode = "abort" if given.get("mode") is None else given["mode"]
        if mode == "retract":
            raise RequestRefused(
                "mode retract is not supported; use in_place, which keeps the computed KV, or abort",
                code="unsupported_field",
                param="mode",
            )
        one_of(mode, ("abort", "in_place"), "mode")
        await self._manager.control.pause()
        aborted = self._manager.abort_all() if mode == "abort" else []
        return JSONAnswer({"status": "ok", "message": "paused", "aborted": aborted})

    async def resume(self, request: Request) -> Response:
        """Resume. No error where nothing was paused."""
        async with self._bodies.settings(request) as given:
            refuse_unserved(given, ())
        await self._manager.control.resume()
        return JSONAnswer({"status": "ok", "message": "running"})

    async def start_profile(self, request: Request) -> Response:
        """Record where steps spend their time, until stop_profile. Takes no settings and needs no body."""
        await self._refuse_settings(request)
        await self._manager.control.start_profile()
        return JSONAnswer({"success": True, "message": "profiling; POST /stop_profile returns the report"})

    async def stop_profile(self, request: Request) -> Response:
        await self._refuse_settings(request)
        return JSONAnswer(await self._manager.control.stop_profile())

    async def _refuse_settings(self, request: Request) -> None:
        async with self._bodies.settings(request) as given:
            refuse_unserved(given, (), _PROFILE_SETTINGS)
