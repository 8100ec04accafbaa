"""Calls to a server under test, and what every answer must look like."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx

from tests.doubles.server_under_test import ServerUnderTest


def generate(server: ServerUnderTest, max_new_tokens: int = 4, **fields: Any) -> Any:
    fields.setdefault("sampling_params", {})["max_new_tokens"] = max_new_tokens
    response = server.generate(**fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "code", "param"}
    return body["error"]


def raw_post(body: bytes, *headers: str) -> bytes:
    """The bytes of a POST /generate, for tests that talk to the socket."""
    lines = ["POST /generate HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def long(rid: str, **fields: Any) -> dict:
    return {"text": "abc", "rid": rid, "sampling_params": {"max_new_tokens": 4000}, **fields}


def raw_answer(server: ServerUnderTest, sent: bytes) -> bytes:
    """The first bytes that come back for ``sent``; empty if the connection was closed without an answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(sent)
        return connection.recv(65536)
