"""Routes that describe the model, the settings and the load of the server; and ``/``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from starlette.responses import RedirectResponse, Response

from ...runtime import metrics
from ...runtime.tokenizer_manager import TokenizerManager
from ..chat.chats import Chats
from ..description.json_schema import COUNT, Properties, answered, flag, list_of, nullable, number, open_object, string
from ..description.openapi import Operation
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
    "default_sampling_params": open_object("Used where a request leaves a parameter out; from generation_config.json."),
    "special_tokens": {},
}
_MODEL = Operation(summary="The model", answer=answered(_MODEL_INFO, title="ModelInfo"))
_SERVER = Operation(
    summary="Every setting but the keys, and the worker's report", answer=open_object(), refusals=(504,)
)
_VERSION = Operation(summary="Baton's version", answer=answered({"version": string()}, title="Version"))
_METRICS = Operation(summary="Metrics, for Prometheus", text="text/plain")
_OLD_LOAD = Operation(
    summary="The load of the server, in the shape of older routers",
    answer=list_of(
        answered(
            dict.fromkeys(("dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens"), COUNT),
            title="Load",
        )
    ),
    refusals=(504,),
)
_LOADS = Operation(
    summary="The load of the server",
    answer=answered(
        {
            "timestamp": string(),
            "version": string(),
            "dp_rank_count": COUNT,
            "loads": list_of(
                answered(
                    {
                        **dict.fromkeys(
                            (
                                "dp_rank",
                                "num_running_reqs",
                                "num_waiting_reqs",
                                "num_total_reqs",
                                "num_used_tokens",
                                "max_total_num_tokens",
                                "max_running_requests",
                            ),
                            COUNT,
                        ),
                        "token_usage": number("", 0, 1),
                        "cache_hit_rate": number("", 0, 1),
                        "utilization": number("", 0, 1),
                    }
                )
            ),
            "aggregate": answered(
                {
                    **dict.fromkeys(("total_running_reqs", "total_waiting_reqs", "total_reqs"), COUNT),
                    "avg_token_usage": number("", 0, 1),
                }
            ),
        },
        title="Loads",
    ),
    refusals=(504,),
)


class InformationRoutes:
    def __init__(self, manager: TokenizerManager, chats: Chats, args: ServerArgs, defaults: Mapping[str, Any]) -> None:
        """defaults: sampling parameters for requests that leave them out."""
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
            Route("/get_load", self.get_load, GET, operation=_OLD_LOAD),
            Route("/v1/loads", self.loads, GET, operation=_LOADS),
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

    async def get_load(self) -> Response:
        """The shape that routers of older versions read."""
        load = await self._load()
        waiting, running = load["num_waiting_reqs"], load["num_running_reqs"]
        tokens = load["num_used_tokens"]
        return JSONAnswer(
            [{"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting, "num_tokens": tokens}]
        )

    async def loads(self) -> Response:
        load = await self._load()
        running, waiting = load["num_running_reqs"], load["num_waiting_reqs"]
        return JSONAnswer(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": baton_version(),
                "dp_rank_count": 1,
                "loads": [load],
                "aggregate": {
                    "total_running_reqs": running,
                    "total_waiting_reqs": waiting,
                    "total_reqs": running + waiting,
                    "avg_token_usage": load["token_usage"],
                },
            }
        )

    async def _load(self) -> dict[str, Any]:
        """The load of the one rank. Tokens that eviction would free count as unused, as in SGLang. cache_hit_rate:
        share of the prompt tokens since the start."""
        worker = await self._manager.control.info()
        stats, most = worker["stats"], worker["max_running_requests"]
        running, waiting, queries = stats["num_running_reqs"], stats["num_queue_reqs"], stats["prefix_cache_queries"]
        total = stats["total_tokens"]
        used = total - stats["free_tokens"] - stats["evictable_tokens"]
        return {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_used_tokens": used,
            "max_total_num_tokens": total,
            "max_running_requests": most,
            "token_usage": used / total,
            "cache_hit_rate": stats["prefix_cache_hits"] / queries if queries else 0.0,
            "utilization": min(1.0, running / most),
        }


_DASHBOARD = "dashboard"
"""Relative: a proxy may serve this under a prefix."""


class RootRoutes:
    """``/``, open to all: redirects browsers to the dashboard, and reveals nothing about the model."""

    def __init__(self, args: ServerArgs) -> None:
        self._has_dashboard = args.server.dashboard
        # Claude Code asks for the head before anything else, and takes no redirect.
        self.routes = [
            Route("/", self.get_root, GET, "open"),
            Route("/", self.head_root, ("HEAD",), "open"),
        ]

    async def get_root(self) -> Response:
        if self._has_dashboard:
            return RedirectResponse(_DASHBOARD, status_code=307, headers={"Cache-Control": "no-store"})
        return JSONAnswer({"server": "baton", "docs": "/docs"})

    async def head_root(self) -> Response:
        return Response(media_type="application/json")
