"""``/`` where there is no dashboard, and its routes."""

from __future__ import annotations

import asyncio
import json

from starlette.responses import Response

from baton.entrypoints.http.information_routes import RootRoutes
from baton.entrypoints.http.route import Route
from baton.entrypoints.server_args import compose


def called(route: Route) -> Response:
    async def call() -> Response:
        return await route.handler()

    return asyncio.run(call())


def test_root_without_dashboard_describes_the_server() -> None:
    routes = RootRoutes(compose({"model_path": "m", "dashboard": False})).routes
    assert {(route.path, *route.methods, route.access) for route in routes} == {
        ("/", "GET", "open"), ("/", "HEAD", "open"),
    }  # fmt: skip
    answers = list(map(called, routes))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert json.loads(bytes(answers[0].body)) == {"server": "baton", "docs": "/docs"} and answers[1].body == b""


def test_root_with_dashboard_redirects_to_it() -> None:
    get, _ = RootRoutes(compose({"model_path": "m"})).routes
    answer = called(get)
    assert answer.status_code == 307 and answer.headers["location"] == "dashboard"
