"""``/get_load`` and ``/v1/loads``: how busy the server is, for load balancers. SGLang's shapes;
there is one rank, 0."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from ...runtime.tokenizer_manager import TokenizerManager
from ..description.json_schema import COUNT, answered, list_of, number, string
from ..description.operation import Operation
from ..version import baton_version
from .route import GET, Route
from .wire.answers import JSONAnswer

_LOAD = Operation(
    summary="How busy the server is, as older routers read it",
    answer=list_of(
        answered(
            dict.fromkeys(("dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens"), COUNT),
            title="Load",
        )
    ),
    refusals=(504,),
)
_LOADS = Operation(
    summary="How busy the server is",
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


class LoadRoutes:
    def __init__(self, manager: TokenizerManager) -> None:
        self._control = manager.control
        self.routes = [
            Route("/get_load", self.get_load, GET, operation=_LOAD),
            Route("/v1/loads", self.loads, GET, operation=_LOADS),
        ]

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
        worker = await self._control.info()
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
