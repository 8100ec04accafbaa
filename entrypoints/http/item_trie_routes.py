"""Item tries: upload one under a name, list them, forget one."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from ...runtime.constraints import item_tries
from ...runtime.tokenizer_manager import TokenizerManager
from ...scheduler.outcome import RequestRefused
from ..description.json_schema import answered, list_of, open_object, string
from ..description.openapi import Operation
from ..fields.item_trie_source import build_item_trie
from .route import BINARY, DELETE, GET, POST, Route
from .wire.answers import JSONAnswer
from .wire.bodies import Bodies

_TRIE = open_object("Its name, and how many items it has.")
_LOAD = Operation(
    summary="Load an item trie",
    about="The body is a .npy file: a table of token ids, a row for each item.",
    tag="Item tries",
    body={"type": "string", "format": "binary"},
    query={"name": string("The name that requests use.", least=1)},
    required_query=("name",),
    answer=_TRIE,
    refusals=(504,),
)
_LIST = Operation(
    summary="List the item tries",
    tag="Item tries",
    answer=answered({"item_tries": list_of(_TRIE)}),
    refusals=(504,),
)
_DELETE = Operation(
    summary="Forget an item trie",
    tag="Item tries",
    answer=answered({"deleted": string()}),
    refusals=(404, 504),
)


class ItemTrieRoutes:
    def __init__(self, manager: TokenizerManager, bodies: Bodies) -> None:
        self._control = manager.control
        self._bodies = bodies
        self.routes = [
            Route("/item_tries", self.load_item_trie, POST, "admin", BINARY, operation=_LOAD),
            Route("/item_tries", self.list_item_tries, GET, operation=_LIST),
            Route("/item_tries/{name}", self.delete_item_trie, DELETE, "admin", operation=_DELETE),
        ]

    async def load_item_trie(self, request: Request) -> Response:
        """Store the uploaded items under ?name=. New requests get them; running ones keep the trie they have."""
        name = request.query_params.get("name")
        if name is None:
            raise RequestRefused("name is missing; POST /item_tries?name=NAME", param="name")
        async with self._bodies.binary(request) as body:
            content = bytes(body)
            body.clear()
            trie = await build_item_trie(content)
        await self._control.load_item_trie(name, trie)
        return JSONAnswer(item_tries.describe(name, trie))

    async def list_item_tries(self) -> Response:
        return JSONAnswer({"item_tries": await self._control.list_item_tries()})

    async def delete_item_trie(self, name: str) -> Response:
        if not await self._control.delete_item_trie(name):
            raise RequestRefused(f"there is no item trie {name!r}", code="item_trie_not_found", param="name")
        return JSONAnswer({"deleted": name})
