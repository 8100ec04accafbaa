"""Health checks: is the server alive, and is it ready?"""

from __future__ import annotations

import time
from dataclasses import dataclass
from uuid import uuid4

from starlette.responses import Response

from ...runtime.clients import SOLE_CLIENT
from ...runtime.prompt import Prompt
from ...runtime.tokenizer_manager import TokenizerManager
from ...scheduler.outcome import RequestRefused
from ...scheduler.request_spec import PoolingSpec, RequestSpec
from ...scheduler.sampling_params import SamplingParams
from ..description.json_schema import answered, string
from ..description.openapi import Operation
from ..server_config import ServerArgs
from .route import POST, PROBE, Route
from .wire.answers import JSONAnswer

_HEALTH_GENERATE_TIMEOUT_S = 20.0

_SILENCE_S = 10.0
"""The worker reports once a second, through the detokenizer. --watchdog-timeout ends the server, this only says so."""

_PROBES = "probes"
"""Namespace of the server's own requests; those of clients are digests."""

_STATUS = answered({"status": string()}, title="Status")
_HEALTH = Operation(summary="Can the server take requests?", tag="Health", answer=_STATUS)
_PING = Operation(summary="Another name of /health", tag="Health", answer=_STATUS)
_READY = Operation(summary="Has a first answer passed through all processes?", tag="Health", answer=_STATUS)
_GENERATES = Operation(summary="Does it generate a token?", tag="Health", answer=_STATUS, refusals=(404, 409, 429, 504))


def probe_of(rid: str, *, generates: bool) -> Prompt:
    """The shortest prompt that passes through all processes: one token is generated, or, by a model without a language
    head, one token embedded. It begins no job, finds no KV, and leaves none for others: nothing shares its namespace,
    and nothing of it is stored on another tier."""
    sampling = SamplingParams(max_new_tokens=int(generates), temperature=0.0)
    pooling = None if generates else PoolingSpec()
    spec = RequestSpec(rid=rid, sampling=sampling, namespace=_PROBES, retain_ttl=0.0, no_reuse_from=0, pooling=pooling)
    return Prompt(spec=spec, input_ids=[0])


@dataclass(slots=True)
class Readiness:
    """Set by the server, read by the routes. warmed_up: the first answer has passed through all processes."""

    warmed_up: bool = False


class HealthRoutes:
    def __init__(self, manager: TokenizerManager, args: ServerArgs, readiness: Readiness) -> None:
        self._manager = manager
        self._args = args
        self._readiness = readiness
        self.routes = [
            Route("/health", self.health, PROBE, "open", operation=_HEALTH),
            Route("/health_generate", self.health_generate, PROBE, "open", operation=_GENERATES),
            Route("/ready", self.ready, PROBE, "open", operation=_READY),
            Route("/ping", self.health, PROBE, "open", operation=_PING),
            Route("/ping", self.health, POST, "open", operation=_PING),
        ]

    async def health(self) -> Response:
        """200 while the server can take requests: the worker is loaded and has reported lately, and no shutdown is
        under way. Cheap."""
        self._refuse_unhealthy()
        return JSONAnswer({"status": "ok"})

    async def ready(self) -> Response:
        """200 once a first answer has passed through all processes."""
        self._refuse_unhealthy()
        if not self._readiness.warmed_up:
            raise RequestRefused("the server is warming up", code="not_ready")
        return JSONAnswer({"status": "ready"})

    async def health_generate(self) -> Response:
        """200 once a token has been generated, or embedded where the model generates none, by this call or, in the
        meantime, by any other."""
        self._refuse_unhealthy()
        if self._manager.control.paused:
            raise RequestRefused(
                "generation is paused, so no token can show that it works; POST /continue_generation, or ask /health",
                code="paused",
            )
        asked = time.monotonic()
        prompt = probe_of(f"health-{uuid4().hex}", generates=self._manager.limits.generates)
        with await self._manager.open_answer(SOLE_CLIENT, [prompt], stream=False) as answer:
            while not answer.finished and self._manager.last_output_at < asked:
                if time.monotonic() - asked > _HEALTH_GENERATE_TIMEOUT_S:
                    message = f"no token was generated within {_HEALTH_GENERATE_TIMEOUT_S:g} s"
                    raise RequestRefused(message, code="unhealthy")
                await answer.wait(0.5)
            if answer.finished:
                await answer.outputs()  # raises the error, if there was one
        return JSONAnswer({"status": "ok"})

    def _refuse_unhealthy(self) -> None:
        if self._manager.start_phase:
            raise RequestRefused(f"the server is starting: {self._manager.start_phase}", code="not_ready")
        if not self._manager.is_ready:
            raise RequestRefused("the server is shutting down", code="not_ready")
        silent = self._manager.seconds_since_heartbeat
        if silent > min(_SILENCE_S, self._args.server.watchdog_timeout):
            message = f"the worker, or the detokenizer, has been silent for {silent:.0f} s"
            raise RequestRefused(message, code="unhealthy")
