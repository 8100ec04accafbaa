"""``/cache``: tiers, leases and statistics of the prefix cache. ``/flush_cache``: empties it."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from ...runtime.tokenizer_manager import TokenizerManager
from ...scheduler.cache_stats import HitTokens
from ..description.json_schema import (
    COUNT,
    MAX_INT,
    SUCCESS,
    answered,
    flag,
    list_of,
    nullable,
    number,
    open_object,
    string,
    taken,
    whole,
)
from ..description.openapi import Operation
from ..fields.reading import refuse_unserved
from .keys import CLIENT, caller, sees_all
from .route import GET, GET_OR_POST, POST, Route
from .wire.answers import JSONAnswer
from .wire.bodies import Bodies
from .wire.query import whole_number

MAX_LEASES = 1000
"""On a page."""

_TIERS = Operation(
    summary="Contents and activity of each tier of the KV cache", tag="Cache", answer=open_object(), refusals=(504,)
)
_LEASE = answered(
    {
        "serial": whole("In the order in which they were granted.", 0),
        "rid": nullable(string("The request whose output it keeps; null where only waiting requests know it.")),
        "index": nullable(COUNT),
        "job_id": nullable(string()),
        "user": string("The client (user, cache salt or API key) in whose share it counts."),
        "tokens": COUNT,
        "own_tokens": whole("Tokens that count for it, of those that several leases hold.", 0),
        "idle_s": number("Since it was granted or returned.", 0),
        "expires_in_s": nullable(number("Null while a request waits to take it over.", 0)),
        "is_claimed": flag("A request waits to take it over."),
    },
    title="Lease",
    optional=CLIENT,
)
_LEASES = Operation(
    summary="List the leases",
    about="The client's leases, in all namespaces. The admin is shown the leases of all clients.",
    tag="Cache",
    query={
        "after": whole("The ``next`` of the page before.", -1, default=-1),
        "limit": whole("Leases on a page.", 1, MAX_LEASES, default=100),
    },
    answer=answered(
        {
            "leases": list_of(_LEASE),
            "next": nullable(whole("The ``after`` of the next page; null on the last.", 0)),
            "live": COUNT,
            "leased_tokens": COUNT,
        },
        title="Leases",
    ),
    refusals=(504,),
)
_SHARE = nullable(number("Null where nothing was counted.", 0, 1))
_FOUND = {
    "query_tokens": COUNT,
    "hit_tokens": COUNT,
    "hit_rate": _SHARE,
}
_QUERIES = {
    "prompts": whole("Admitted; each of n samples is one.", 0),
    **_FOUND,
    "hits": answered(dict.fromkeys(HitTokens.__struct_fields__, COUNT)),
}
_TIMES = answered(
    {
        "tokens": COUNT,
        "mean_s": nullable(number("", 0)),
        "buckets": list_of(answered({"to": nullable(number("Seconds; null in the last.", 0)), "tokens": COUNT})),
    }
)
_STATISTICS = Operation(
    summary="Hits and evictions of the prefix cache",
    about="Since the start, or the last reset, and in the last minutes.",
    tag="Cache",
    answer=answered(
        {
            "seconds": number("Period of all counts but ``windows``.", 0),
            "queries": answered(_QUERIES),
            "depth": list_of(
                answered({"from": whole("Position in the prompt.", 0), "to": nullable(COUNT), **_FOUND}),
            ),
            "kv": answered(
                dict.fromkeys(
                    (
                        "stored_tokens",
                        "evicted_nodes",
                        "evicted_tokens",
                        "retired_tokens",
                        "to_host_tokens",
                        "given_up_tokens",
                    ),
                    COUNT,
                )
            ),
            "evicted_too_early": answered({"recorded_tokens": COUNT, "recomputed_tokens": COUNT, "share": _SHARE}),
            **dict.fromkeys(("lifetime", "idle_time", "reuse_gap"), _TIMES),
            "windows": list_of(
                answered({"seconds": COUNT, "covered_s": number("", 0), **_QUERIES, "evicted_tokens": COUNT})
            ),
            "alert": answered({"threshold": number("--hit-rate-alert", 0, 1), "active": flag()}),
        },
        title="CacheStatistics",
    ),
    refusals=(504,),
)
_RESET = Operation(
    summary="Reset the statistics of the cache",
    about="Metrics and the totals of ``/server_info`` are not reset.",
    tag="Cache",
    body=taken({}),
    body_is_optional=True,
    answer=SUCCESS,
    refusals=(504,),
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
        self.routes = [
            Route("/cache/tiers", self.tiers, GET, operation=_TIERS),
            Route("/cache/leases", self.leases, GET, operation=_LEASES),
            Route("/cache/statistics", self.statistics, GET, operation=_STATISTICS),
            Route("/cache/statistics/reset", self.reset_statistics, POST, "admin", operation=_RESET),
            Route("/flush_cache", self.flush_cache, GET_OR_POST, "admin", operation=_FLUSH),
        ]

    async def tiers(self) -> Response:
        """Contents and activity of each tier of the KV cache."""
        return JSONAnswer(await self._control.tiers())

    async def leases(self, request: Request) -> Response:
        """The live leases, page by page: of the client, or, for the admin, of all."""
        given = dict(request.query_params)
        refuse_unserved(given, ("after", "limit"))
        after = whole_number(given, "after", -1, -1, MAX_INT)
        limit = whole_number(given, "limit", 100, 1, MAX_LEASES)
        if sees_all(request):
            return JSONAnswer(await self._control.leases_of_all_clients(after, limit))
        return JSONAnswer(await self._control.leases(caller(request), after, limit))

    async def statistics(self) -> Response:
        """Hits and evictions of the prefix cache."""
        return JSONAnswer(await self._control.cache_statistics())

    async def reset_statistics(self, request: Request) -> Response:
        async with self._bodies.settings(request) as given:
            refuse_unserved(given, ())
        await self._control.reset_cache_statistics()
        return JSONAnswer({"success": True, "message": "the statistics of the cache were reset"})

    async def flush_cache(self, request: Request) -> Response:
        async with self._bodies.settings(request) as given:
            refuse_unserved(given, ())
        await self._control.flush_cache()
        return JSONAnswer({"success": True, "message": "the cache is empty"})
