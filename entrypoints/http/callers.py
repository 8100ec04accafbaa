"""Who sent a request, as the guards found out before its route was called."""

from __future__ import annotations

from fastapi import Request

from ...runtime.clients import Client
from ..description.json_schema import Properties, string

CLIENT: Properties = {"client": string("Whose it is; shown to the admin where keys tell clients apart.")}


def caller(request: Request) -> Client:
    """The client whose names this request means: that of its key, or the one for which the admin speaks."""
    return request.state.caller.client


def sees_all(request: Request) -> bool:
    """Whether lists show the things of all clients: to the admin of a server that tells clients apart."""
    return request.state.caller.sees_all
