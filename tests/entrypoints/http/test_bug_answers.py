"""An exception in a route: its client learns the kind of error, and that the connection is of no more use."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from baton.entrypoints.chat.setup import ChatSetup
from baton.entrypoints.http.health_routes import Readiness
from baton.entrypoints.http.keys import Keys
from baton.entrypoints.http.server import build_app
from baton.entrypoints.server_args import compose
from baton.runtime.channels import Endpoints
from baton.runtime.metrics import ServerMetrics
from baton.runtime.text.tokenizer import Tokenizer
from baton.runtime.tokenizer_manager import TokenizerManager

TOY = Path(__file__).parents[3] / "examples" / "toy_model"


def test_internal_error_answer_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn closes it behind the answer: a client that was not told sends its next request there, and gets none."""

    async def ask() -> httpx.Response:
        args = compose({"model_path": str(TOY)})
        tokenizer = Tokenizer.load(str(TOY))
        manager = TokenizerManager(tokenizer=tokenizer, endpoints=Endpoints.for_threads(), metrics=ServerMetrics("toy"))
        monkeypatch.setattr(manager.control, "info", lambda: 1 / 0)
        app = build_app(manager, args, Readiness(), Keys(), ChatSetup(args.chat, tokenizer), {})
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.get("/server_info")
        finally:
            manager.close()

    answer = asyncio.run(ask())
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert answer.json()["error"]["message"].startswith("internal error (ZeroDivisionError)")
    assert answer.headers["connection"] == "close"
