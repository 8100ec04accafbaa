"""Records where steps spend their time, from ``/start_profile`` to ``/stop_profile``."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from ...runtime.tokenizer_manager import TokenizerManager
from ..description.json_schema import SUCCESS, open_object, taken
from ..description.operation import Operation
from ..fields.reading import refuse_unserved
from .route import POST, Route
from .wire.answers import JSONAnswer
from .wire.bodies import Bodies

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
    summary="Stop recording, and read what was found",
    tag="Profile",
    body=_BODY,
    body_is_optional=True,
    answer=open_object(),
    refusals=(409, 504),
)


class ProfileRoutes:
    def __init__(self, manager: TokenizerManager, bodies: Bodies) -> None:
        self._control = manager.control
        self._bodies = bodies
        self.routes = [
            Route("/start_profile", self.start_profile, POST, "admin", operation=_START),
            Route("/stop_profile", self.stop_profile, POST, "admin", operation=_STOP),
        ]

    async def start_profile(self, request: Request) -> Response:
        """Record where steps spend their time, until stop_profile. Takes no settings and needs no body."""
        await self._refuse_settings(request)
        await self._control.start_profile()
        return JSONAnswer({"success": True, "message": "profiling; POST /stop_profile answers with what was found"})

    async def stop_profile(self, request: Request) -> Response:
        await self._refuse_settings(request)
        return JSONAnswer(await self._control.stop_profile())

    async def _refuse_settings(self, request: Request) -> None:
        async with self._bodies.settings(request) as given:
            refuse_unserved(given, (), _PROFILE_SETTINGS)
