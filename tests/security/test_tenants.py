"""Two clients of one server: neither learns, continues or ends anything of the other's, by any endpoint or name.

The table in SECURITY.md is read and checked: every route has a line in it, and every line is tried. A route, or a field
that takes the name of something, for which no line or no attack is written here fails a test.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from baton.entrypoints.chat.setup import ChatSetup
from baton.entrypoints.fields.conversation_names import NAME_HEADERS
from baton.entrypoints.fields.foreign_fields import ENDPOINT_OF, FOREIGN_OF
from baton.entrypoints.http.health_routes import Readiness
from baton.entrypoints.http.keys import Keys
from baton.entrypoints.http.route import Route
from baton.entrypoints.http.server import server_routes
from baton.entrypoints.http.unserved_routes import UNSERVED
from baton.entrypoints.server_args import compose
from baton.runtime.channels import Endpoints
from baton.runtime.metrics import ServerMetrics
from baton.runtime.text.tokenizer import Tokenizer
from baton.runtime.tokenizer_manager import TokenizerManager
from tests.doubles.server_under_test import ServerUnderTest

ROOT = Path(__file__).parents[2]
TOY = ROOT / "examples" / "toy_model"
KEYS = {"alice": "key-of-alice", "bob": "key-of-bob", "admin": "key-of-the-admin"}
TASK = "How many lines are in manual.md?"
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
NOT_SERVED = "endpoints of other servers that this one has not"

Endpoint = tuple[str, str]
"""Method and path, as the table has them."""


# -- the routes, and the table -----------------------------------------------------------------------------------------


def every_route() -> list[Route]:
    async def routes() -> list[Route]:
        args = compose({"model_path": str(TOY)})
        tokenizer = Tokenizer.load(str(TOY))
        manager = TokenizerManager(tokenizer=tokenizer, endpoints=Endpoints.for_threads(), metrics=ServerMetrics("toy"))
        try:
            return server_routes(manager, args, Readiness(), Keys(), ChatSetup(args.chat, tokenizer), {})
        finally:
            manager.close()

    return asyncio.run(routes())


def endpoints_of(route: Route) -> list[Endpoint]:
    path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
    return [(method, path) for method in route.methods if method != "HEAD"]


EVERY_ROUTE = every_route()
OF_OTHERS = [route for route in EVERY_ROUTE if route.path.removesuffix("/{below:rest}") in chain(*UNSERVED.values())]
"""Endpoints that are there to say that this server has none."""
ROUTES = {endpoint: each for each in EVERY_ROUTE if each not in OF_OTHERS for endpoint in endpoints_of(each)}


class Line(NamedTuple):
    anonymous: str
    client: str
    admin: str
    others: str


def table() -> dict[Endpoint, Line]:
    text = (ROOT / "SECURITY.md").read_text()
    rows = text.split("| endpoint | anonymous |")[1].split("\n\n")[0].splitlines()[2:]
    lines: dict[Endpoint, Line] = {}
    for row in rows:
        named, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        line = Line(*cells)
        found = [tuple(name.split(" ", 1)) for name in re.findall("`([^`]+)`", named)]
        if named == NOT_SERVED:
            assert line == Line("401", "yes", "yes", "nothing")
            continue
        assert found, f"{named!r} names no endpoint"
        for endpoint in found:
            assert endpoint not in lines, f"{endpoint} has two lines"
            lines[endpoint] = line  # type: ignore[index]
    return lines


TABLE = table()


def test_unimplemented_endpoints_need_a_key_and_take_no_names() -> None:
    assert len(OF_OTHERS) > 50
    assert all(route.access == "serving" and route.operation is None for route in OF_OTHERS)


def test_security_table_lists_every_endpoint() -> None:
    assert sorted(ROUTES) == sorted(TABLE)
    for line in TABLE.values():
        assert line.anonymous in ("yes", "401") and line.client in ("yes", "own", "403")
        assert line.admin in ("yes", "own", "all") and line.others in ("nothing", "unknown", "totals")


@pytest.mark.parametrize("endpoint", sorted(ROUTES))
def test_security_table_matches_the_routes(endpoint: Endpoint) -> None:
    line, route = TABLE[endpoint], ROUTES[endpoint]
    access = {"yes": "serving", "own": "serving", "403": "admin"}[line.client]
    assert route.access == ("open" if line.anonymous == "yes" else access)
    assert (line.others == "unknown") == bool(names_taken(route)), "whoever takes a name must not tell whose it is"


# -- what takes a name -------------------------------------------------------------------------------------------------

CONVERSATION_FIELDS = {"conversation", "conversation_id", "session_id"}
NAMING = {"rid", "request_id", "continuation_of", "previous_response_id", "job_id", "parent_job_id"}
NAMING |= CONVERSATION_FIELDS
"""Fields that name something of a client."""

NAMELESS = {"user", "best_of", "keep_parent", "lora_int_id"}
"""Other fields whose names look like one: a budget's owner, a number, a switch, a number that is refused."""

_LOOKS_LIKE_A_NAME = re.compile(r"(^|_)(rid|id|of|job|user|parent|session|conversation)$")

CONVERSATION_HEADERS: dict[str, dict[str, str]] = {
    "X-Dynamo-Session-ID": {"X_Dynamo_Session_ID": "NAME"},
    "X-Dynamo-Parent-Session-ID": {"X_Dynamo_Session_ID": "his-NAME", "X_Dynamo_Parent_Session_ID": "NAME"},
    "X-Claude-Code-Session-Id": {"X_Claude_Code_Session_Id": "NAME"},
    "X-Claude-Code-Agent-Id": {"X_Claude_Code_Session_Id": "NAME", "X_Claude_Code_Agent_Id": "NAME"},
    "X-Claude-Code-Parent-Agent-Id": {
        "X_Claude_Code_Session_Id": "NAME", "X_Claude_Code_Agent_Id": "his-NAME",
        "X_Claude_Code_Parent_Agent_Id": "NAME",
    },
    "Session-Id": {"Session_Id": "NAME"},
    "Thread-Id": {"Session_Id": "his-NAME", "Thread_Id": "NAME"},
    "X-Codex-Parent-Thread-Id": {"Thread_Id": "his-NAME", "X_Codex_Parent_Thread_Id": "NAME"},
    "X-Session-Id": {"X_Session_Id": "NAME"},
    "X-Parent-Session-Id": {"X_Session_Id": "his-NAME", "X_Parent_Session_Id": "NAME"},
    "X-SMG-Routing-Key": {"X_SMG_Routing_Key": "NAME"},
    "X-Session-Affinity": {"X_Session_Affinity": "NAME"},
}  # fmt: skip
"""Headers that name a conversation, each with those that a request needs to name it so."""

CONVERSATION_JOBS = (
    "dynamo:NAME", "claude-code:NAME", "claude-code:NAME/NAME", "codex:NAME", "session:NAME", "conversation:NAME",
    "conversation-id:NAME", "session-id:NAME",
)  # fmt: skip


def test_every_header_that_names_a_conversation_is_attacked() -> None:
    assert set(CONVERSATION_HEADERS) == set(NAME_HEADERS) - {"X-Dynamo-Session-Final"}


OWNED = {"response_id", "job_id"}
"""Parameters of paths that name something of a client."""

SHARED = {"name", "model", "path"}
"""Those that name what belongs to the server: an item trie or a file, the model, a file of the dashboard."""


def names_taken(route: Route) -> set[str]:
    """The fields, parameters and headers by which a request to this route names something of a client's."""
    names = set(re.findall(r"{(\w+)", route.path)) & OWNED
    if route.operation is not None:
        names |= NAMING & set((route.operation.body or {}).get("properties", {})) - idle_fields(route)
        names |= {"X-Job-Id", "X-Parent-Job-Id", *CONVERSATION_HEADERS} & set(route.operation.headers)
    return names


def idle_fields(route: Route) -> set[str]:
    """Fields of other servers that are refused, or without effect."""
    for api in FOREIGN_OF:
        if ENDPOINT_OF[api] == route.path.removesuffix("/count_tokens"):
            return {name for name, field in FOREIGN_OF[api].items() if field.outcome not in ("used", "names")}
    return set()


def test_name_like_parameters_are_classified() -> None:
    for route in ROUTES.values():
        assert set(re.findall(r"{(\w+)", route.path)) <= OWNED | SHARED, route.path
        properties = (route.operation.body or {}).get("properties", {}) if route.operation is not None else {}
        strange = {name for name in properties if _LOOKS_LIKE_A_NAME.search(name)}
        strange -= NAMING | NAMELESS | idle_fields(route)
        assert not strange, f"{route.path} takes {strange}: say whether that names something of a client"


# -- a server, and what alice has there --------------------------------------------------------------------------------


class Tenant:
    """One key of a server."""

    def __init__(self, server: ServerUnderTest, name: str) -> None:
        headers = {"Authorization": f"Bearer {KEYS[name]}"} if name in KEYS else {}
        self._http = httpx.Client(base_url=server.url, timeout=60, headers=headers)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return self._http.request(method, path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def generate(self, **fields: Any) -> httpx.Response:
        return self.ask("POST", "/generate", {"sampling_params": GREEDY, **fields})

    def release_leases(self) -> None:
        for lease in self.ask("GET", "/cache/leases?limit=1000").json()["leases"]:
            self.ask("POST", "/release", {"rid": lease["rid"]})

    def close(self) -> None:
        self._http.close()


class Tenants(NamedTuple):
    server: ServerUnderTest
    alice: Tenant
    bob: Tenant
    admin: Tenant
    nobody: Tenant


def serving(folder: Path, *flags: str) -> Iterator[Tenants]:
    (folder / "keys").write_text(f"alice: {KEYS['alice']}\nbob: {KEYS['bob']}\n")
    (folder / "admin").write_text(KEYS["admin"])
    flags += ("--api-key-file", str(folder / "keys"), "--admin-api-key-file", str(folder / "admin"))
    flags += ("--max-total-tokens", "32768", "--linear-backend", "torch", "--dtype", "float32", "--device", "cpu")
    # Leases of bob's own must neither break nor expire: what he is answered would differ.
    flags += ("--max-leased-requests", "1024", "--conversation-ttl", "600")
    with ServerUnderTest(TOY, folder, *flags, behaviour=None) as server:
        server.wait_ready()
        people = [Tenant(server, name) for name in ("alice", "bob", "admin", "")]
        yield Tenants(server, *people)
        for each in people:
            each.close()


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    yield from serving(tmp_path_factory.mktemp("tenants"))


@pytest.fixture(scope="module")
def hers(tenants: Tenants) -> dict[str, str]:
    """Names of what alice has: requests that are leased, a job with pins, a chat, responses."""
    alice = tenants.alice
    assert alice.generate(rid="plan", text=TASK, retain_ttl=600).status_code == 200
    assert alice.generate(rid="step", text=TASK, retain_ttl=600, job_id="job-1").status_code == 200
    chat = {"messages": [{"role": "user", "content": TASK}], "rid": "talk", "max_tokens": 4, "temperature": 0}
    assert alice.ask("POST", "/v1/chat/completions", chat).status_code == 200
    for number, job in enumerate(("taken-job", "chat-taken")):  # for attacks by which bob makes things of these names
        taken = {"rid": ("taken-rid", "taken")[number], "text": TASK, "retain_ttl": 600, "job_id": job}
        assert alice.generate(**taken).status_code == 200
    for headers in CONVERSATION_HEADERS.values():
        taken = {key: value.replace("NAME", "taken-talk") for key, value in headers.items()}
        if "his-NAME" not in headers.values():
            assert alice.ask("POST", "/generate", {"text": TASK, "sampling_params": GREEDY}, **taken).is_success
    for field in sorted(CONVERSATION_FIELDS):
        assert alice.generate(text=TASK, **{field: "taken-talk"}).is_success
    said = {"input": TASK, "rid": "said", "max_output_tokens": 4, "temperature": 0}
    assert alice.ask("POST", "/v1/responses", said).status_code == 200
    behind = {**said, "rid": "behind", "background": True}
    assert alice.ask("POST", "/v1/responses", behind).status_code == 200
    looked_up = {"rid": "plan", "job": "job-1", "chat": "chat-talk", "response": "resp_said", "behind": "resp_behind"}
    looked_up["taken talk"] = "taken-talk"
    return looked_up | {"taken rid": "taken-rid", "taken job": "taken-job", "taken chat": "chat-taken"}


MESSAGES = [{"role": "user", "content": "Hello"}]
TEXT = {"text": "Hello", "sampling_params": GREEDY}
COMPLETION = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": MESSAGES, "max_tokens": 2, "temperature": 0}
RESPONSE = {"input": "Hello", "max_output_tokens": 2, "temperature": 0}
MESSAGE = {"model": "any", "messages": MESSAGES, "max_tokens": 2, "temperature": 0}
COUNTED = {"model": "any", "messages": MESSAGES}


class Attack(NamedTuple):
    """A request that names something; the name comes in place of NAME. what: which of alice's things is named."""

    method: str
    path: str
    by: str
    what: str
    body: dict[str, Any] | None = None
    headers: dict[str, str] = {}  # noqa: RUF012

    def send(self, tenant: Tenant, name: str) -> httpx.Response:
        body = None if self.body is None else json.loads(json.dumps(self.body).replace("NAME", name))
        headers = {key: value.replace("NAME", name) for key, value in self.headers.items()}
        return tenant.ask(self.method, self.path.replace("NAME", name), body, **headers)


def by_body(path: str, body: dict[str, Any], *fields: str) -> list[Attack]:
    what = {"rid": "taken rid", "request_id": "taken rid", "job_id": "taken job", "continuation_of": "rid"}
    attacks = [Attack("POST", path, field, what[field], {**body, field: "NAME"}) for field in fields]
    if "job_id" in fields:
        named = CONVERSATION_FIELDS - ({"conversation"} if path == "/v1/responses" else set())
        attacks += [Attack("POST", path, field, "taken talk", {**body, field: "NAME"}) for field in sorted(named)]
        attacks += [
            Attack("POST", path, name, "taken talk", body, headers) for name, headers in CONVERSATION_HEADERS.items()
        ]
        attacks += [
            Attack("POST", path, "X-Job-Id", "taken job", body, {"X_Job_Id": "NAME"}),
            Attack("POST", path, "parent_job_id", "taken job", {**body, "job_id": "his-NAME", "parent_job_id": "NAME"}),
            Attack(
                "POST", path, "X-Parent-Job-Id", "taken job", body, {"X_Job_Id": "his-NAME", "X_Parent_Job_Id": "NAME"}
            ),
            Attack("POST", path, "X-Job-Id", "taken chat", body, {"X_Job_Id": "NAME"}),
            Attack("POST", path, "X-Request-Id", "taken rid", body, {"X_Request_Id": "NAME"}),
            Attack("POST", path, "job_id", "taken chat", {**body, "extra_body": {"job_id": "NAME"}}),
        ]
    return attacks


POOLED: dict[str, dict[str, Any]] = {
    **{key: {"input": "Hello"} for key in ("/v1/embeddings", "/pooling", "/v1/classify", "/classify")},
    "/encode": {"text": "Hello"},
    **{key: {"query": "Hello", "items": ["you"], "label_token_ids": [5]} for key in ("/v1/score", "/score")},
    **{key: {"query": "Hello", "documents": ["you"]} for key in ("/v1/rerank", "/rerank", "/v2/rerank")},
}
"""Endpoints that pool prompts. This model classifies and ranks nothing: it refuses both, whatever they are named."""

_PARENT = {"continuation_suffix": " and", "sampling_params": GREEDY}
_OF_A_PATH = ("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")
ATTACKS = [
    *by_body("/generate", TEXT, "rid", "job_id"),
    *by_body("/generate", _PARENT, "continuation_of"),
    Attack("POST", "/generate", "continuation_of", "rid", {**_PARENT, "continuation_of": "NAME", "keep_parent": True}),
    Attack("POST", "/generate", "continuation_of", "rid", {**_PARENT, "continuation_of": ["chatcmpl-NAME"]}),
    Attack("POST", "/generate", "continuation_of", "response", {**_PARENT, "continuation_of": "NAME"}),
    Attack("POST", "/generate", "continuation_of", "rid",
           {**_PARENT, "continuation_of": "NAME", "continuation_at": "now"}),
    Attack("POST", "/generate", "rid", "taken rid", {**TEXT, "text": ["Hello", "Hello"], "rid": ["NAME", "other"]}),
    *by_body("/v1/completions", COMPLETION, "rid", "request_id", "job_id"),
    Attack("POST", "/v1/completions", "continuation_of", "rid",
           {"prompt": None, "continuation_of": "cmpl-NAME", "continuation_suffix": " and", "max_tokens": 2}),
    *by_body("/v1/chat/completions", CHAT, "rid", "request_id", "job_id"),
    *by_body("/v1/responses", RESPONSE, "rid", "request_id", "job_id"),
    Attack("POST", "/v1/responses", "previous_response_id", "response", {**RESPONSE, "previous_response_id": "NAME"}),
    Attack("POST", "/v1/responses", "previous_response_id", "behind", {**RESPONSE, "previous_response_id": "NAME"}),
    *by_body("/v1/messages", MESSAGE, "rid", "job_id"),
    *(attack for path, body in POOLED.items() for attack in by_body(path, body, "rid", "request_id")),
    *by_body("/v1/messages/count_tokens", COUNTED, "rid", "job_id"),
    *(Attack(method, f"/v1/responses/NAME{more}", "response_id", what)
      for method, more in _OF_A_PATH for what in ("response", "behind")),
    *(Attack(method, "/jobs/NAME", "job_id", what) for method in ("GET", "DELETE") for what in ("job", "chat")),
    Attack("POST", "/abort_request", "rid", "rid", {"rid": "NAME"}),
    Attack("POST", "/release", "rid", "rid", {"rid": "NAME"}),
    Attack("POST", "/release", "rid", "response", {"rid": "NAME"}),
]  # fmt: skip


def endpoint_of(attack: Attack) -> Endpoint:
    path = re.sub("^/v1/responses/NAME", "/v1/responses/{response_id}", attack.path)
    return attack.method, path.replace("NAME", "{job_id}")


def test_every_name_parameter_is_attacked() -> None:
    taken = {(endpoint, name) for endpoint, route in ROUTES.items() for name in names_taken(route)}
    attacked = {(endpoint_of(attack), attack.by) for attack in ATTACKS}
    assert taken <= attacked, taken - attacked
    # count_tokens belongs to no job: the attacks by a job's headers show that it reads none of them.
    beyond = {by for endpoint, by in attacked - taken if endpoint != ("POST", "/v1/messages/count_tokens")}
    assert beyond <= {"X-Request-Id"}, "which every route that generates takes"


# -- the attacks -------------------------------------------------------------------------------------------------------

_TIMES = {"e2e_latency", "created", "created_at", "completed_at"}
_COUNTED = {"cache_report", "cached_tokens", "cached_tokens_details", "cache_read_input_tokens", "input_tokens"}
"""Fields that differ for a prompt that was sent before, because the cache is shared."""


_DRAWN = re.compile("(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
"""A rid that the server made."""


def without_times(said: Any) -> Any:
    if isinstance(said, dict):
        return {name: without_times(value) for name, value in said.items() if name not in _TIMES | _COUNTED}
    return [without_times(item) for item in said] if isinstance(said, list) else said


def answer(response: httpx.Response, name: str) -> tuple[int, Any, dict[str, str]]:
    """All that can be told apart, with NAME in place of what was named, times left out."""
    bare = name.removeprefix("resp_")
    text = response.text.replace(name, "NAME").replace(bare, "NAME").replace("resp_NAME", "NAME")
    headers = {key: value for key, value in response.headers.items() if key not in ("date", "content-length")}
    headers = {key: _DRAWN.sub("DRAWN", value.replace(bare, "NAME")) for key, value in headers.items()}
    return response.status_code, without_times(json.loads(_DRAWN.sub("DRAWN", text))), headers


@pytest.mark.process
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: f"{a.method} {a.path} {a.by} {a.what}")
def test_objects_of_other_clients_look_nonexistent(tenants: Tenants, hers: dict[str, str], attack: Attack) -> None:
    name = hers[attack.what]
    missing = name[:-2] + "zz"
    found = answer(attack.send(tenants.bob, name), name)
    assert found == answer(attack.send(tenants.bob, missing), missing)
    assert found[0] < 500


@pytest.mark.process
def test_attacks_leave_the_other_clients_objects_intact(tenants: Tenants, hers: dict[str, str]) -> None:
    """And each thing was there to be found: alice finds it by the same names."""
    alice = tenants.alice
    for job, turns in ((hers["job"], 1), (hers["chat"], 1), (hers["taken job"], 1), (hers["taken chat"], 1)):
        known = alice.ask("GET", f"/jobs/{job}").json()
        assert (known["job_id"], known["turns"], known["open_requests"]) == (job, turns, [])
    for name in CONVERSATION_JOBS:
        known = alice.ask("GET", f"/jobs/{name.replace('NAME', hers['taken talk'])}").json()
        assert (known["turns"], known["open_requests"]) == (1, []), name
    assert [pin["rid"] for pin in alice.ask("GET", "/jobs/job-1").json()["pins"]] == ["step"]
    assert {"plan", "step", "talk", "said", "taken-rid", "taken"} <= {
        lease["rid"] for lease in alice.ask("GET", "/cache/leases").json()["leases"]
    }
    for response in (hers["response"], hers["behind"]):
        assert alice.ask("GET", f"/v1/responses/{response}").json()["id"] == response
        assert alice.ask("GET", f"/v1/responses/{response}/input_items").json()["data"]
    kept = alice.generate(continuation_of="plan", continuation_suffix=" and", keep_parent=True).json()
    assert kept["meta_info"]["continuation"]["path"] == "handoff"
    follows = {**RESPONSE, "previous_response_id": hers["response"]}
    assert alice.ask("POST", "/v1/responses", follows).json()["metadata"]["baton_path"] == "handoff"


EVIL = (
    "alice/plan", "bob/plan", "/plan", "alice/", "/", "bob/../alice/plan", "alice//plan", "Alice/plan", "alice\\plan",
    "alice%2Fplan", "alice/plan\u0000", "\u0000plan", "alice\u2215plan", "ａlice/plan", "alice/alice/plan", "plan ",
    "resp_alice/said", "chatcmpl-alice/step", "admin/plan", "anonymous/plan", "plan_0", "🙂/plan", "alice/" + "x" * 500,
)  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("name", EVIL)
def test_crafted_names_do_not_reach_another_client(tenants: Tenants, hers: dict[str, str], name: str) -> None:
    bob = tenants.bob
    bob.release_leases()  # a client may hold so many
    assert bob.generate(continuation_of=name, continuation_suffix=" and").status_code == 404
    assert bob.ask("POST", "/abort_request", {"rid": name}).status_code == 404
    assert bob.ask("POST", "/release", {"rid": name}).json() == {"released": False}
    before = {**RESPONSE, "previous_response_id": f"resp_{name}"}
    assert bob.ask("POST", "/v1/responses", before).status_code == 404
    # And as a name of his own it is one like any other.
    mine = bob.generate(rid=name, job_id=name, text=TASK, retain_ttl=5)
    assert mine.status_code == 200
    bare = re.sub("^(resp_|chatcmpl-)", "", name)
    assert mine.json()["meta_info"]["id"] == bare
    assert name in [job["job_id"] for job in bob.ask("GET", "/jobs").json()["jobs"]]
    child = bob.generate(continuation_of=name, continuation_suffix=" and").json()
    assert child["meta_info"]["continuation"]["path"] == "handoff"
    assert {lease["client"] for lease in tenants.admin.ask("GET", "/cache/leases").json()["leases"]} <= {"alice", "bob"}


@pytest.mark.process
def test_chat_continues_only_turns_of_its_own_client(tenants: Tenants, hers: dict[str, str]) -> None:
    """Bob knows every word of alice's conversation, and asks as if it were his."""
    first = {"messages": [{"role": "user", "content": "List the files."}], "max_tokens": 4, "temperature": 0}
    said = tenants.alice.ask("POST", "/v1/chat/completions", {**first, "rid": "her-turn"}).json()
    grown = [*first["messages"], said["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    grown[1] = {"role": "assistant", "content": grown[1]["content"]}
    his = tenants.bob.ask("POST", "/v1/chat/completions", {**first, "messages": grown}).json()
    assert "continuation" not in his["choices"][0]["baton"], "his first turn stands by itself"
    jobs = [job["job_id"] for job in tenants.bob.ask("GET", "/jobs").json()["jobs"]]
    assert "chat-her-turn" not in jobs and f"chat-{his['id'].removeprefix('chatcmpl-')}" in jobs
    hers_now = tenants.alice.ask("POST", "/v1/chat/completions", {**first, "messages": grown}).json()
    continued = hers_now["choices"][0]["baton"]["continuation"]
    assert continued["path"] == "handoff", "her own turn was not used up"
    assert tenants.alice.ask("GET", "/jobs/chat-her-turn").json()["turns"] == 2


SHARED_NAMES: list[tuple[dict[str, str], dict[str, str]]] = [
    ({"prompt_cache_key": "same"}, {}), ({"user": "same"}, {}), ({}, {"X_SMG_Routing_Key": "same"}),
    ({}, {"X_Session_Affinity": "same"}), ({"conversation_id": "same"}, {}), ({}, {"X_Claude_Code_Session_Id": "same"}),
]  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize(("fields", "headers"), SHARED_NAMES)
def test_clients_with_the_same_names_share_no_job(
    tenants: Tenants, fields: dict[str, str], headers: dict[str, str]
) -> None:
    """Bob sends all that alice sends, a turn later, and edits a copy of her conversation."""
    turns = [{"role": "user", "content": "How long is same.txt?"}]

    def jobs(tenant: Tenant) -> dict[str, int]:
        return {job["job_id"]: job["turns"] for job in tenant.ask("GET", "/jobs").json()["jobs"]}

    def counted(tenant: Tenant) -> dict[str, int]:
        """Turns that this test has added to the tenant's jobs."""
        return {name: turns - before[tenant].get(name, 0) for name, turns in jobs(tenant).items()}

    before = {tenant: jobs(tenant) for tenant in (tenants.alice, tenants.bob)}
    body = {**CHAT, **fields, "messages": turns, "max_tokens": 4}
    said = tenants.alice.ask("POST", "/v1/chat/completions", body, **headers).json()["choices"][0]["message"]["content"]
    turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
    for messages in (turns[:1], turns, [turns[0], {**turns[1], "content": "edited"}, turns[2]]):
        assert tenants.bob.ask("POST", "/v1/chat/completions", {**body, "messages": messages}, **headers).is_success
    (hers,) = {name: count for name, count in counted(tenants.alice).items() if count}.values()
    his = {name: count for name, count in counted(tenants.bob).items() if count}
    assert hers == 1 and list(his.values()) == [3]


@pytest.mark.process
def test_lists_show_own_objects_and_all_to_the_admin(tenants: Tenants, hers: dict[str, str]) -> None:
    alice, bob, admin = tenants.alice, tenants.bob, tenants.admin
    assert bob.generate(rid="his", text="Something else", retain_ttl=600, job_id="his-job").status_code == 200
    of_bob, of_alice = (each.ask("GET", "/jobs").json()["jobs"] for each in (bob, alice))
    everything = admin.ask("GET", "/jobs").json()["jobs"]
    assert {"his-job"} <= {job["job_id"] for job in of_bob} and {"job-1", "chat-talk"} <= {
        j["job_id"] for j in of_alice
    }
    for client, own in (("alice", of_alice), ("bob", of_bob)):
        assert not any("client" in job for job in own)
        shown = [job for job in everything if job.pop("client", client) == client and job in own]
        ids = [job["job_id"] for job in admin.ask("GET", f"/jobs?client={client}").json()["jobs"]]
        assert ids == [job["job_id"] for job in own] and len(shown) <= len(own)
    leases = admin.ask("GET", "/cache/leases?limit=1000").json()
    for client, tenant in (("alice", alice), ("bob", bob)):
        own = tenant.ask("GET", "/cache/leases?limit=1000").json()
        assert own["live"] == len(own["leases"]) == sum(lease["client"] == client for lease in leases["leases"])
        assert {lease["rid"] for lease in own["leases"]} == {
            lease["rid"] for lease in leases["leases"] if lease["client"] == client
        }
        assert not any("/" in (lease["rid"] or "") for lease in own["leases"] if lease["rid"] in ("plan", "his"))
    assert leases["live"] >= 2
    assert "plan" not in bob.ask("GET", "/cache/leases").text and "job-1" not in bob.ask("GET", "/jobs").text


@pytest.mark.process
def test_two_clients_use_one_rid_at_the_same_time(tenants: Tenants, hers: dict[str, str]) -> None:
    alice, bob, admin = tenants.alice, tenants.bob, tenants.admin
    assert admin.ask("POST", "/pause_generation", {"mode": "in_place"}).status_code == 200
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(tenant.generate, rid="same", job_id="same-job", text=text, retain_ttl=60)
            for tenant, text in ((alice, TASK), (bob, "Hello there"))
        ]
        more = pool.submit(alice.ask, "POST", "/v1/responses", {**RESPONSE, "rid": "going"})

        def open_requests() -> list[str]:
            return sorted(rid for job in admin.ask("GET", "/jobs").json()["jobs"] for rid in job["open_requests"])

        tenants.server.wait_until(lambda: open_requests() == ["going", "same", "same"], "all three wait")
        assert alice.generate(rid="same", text="x").status_code == 409, "her own is still open"
        for method, path in (("GET", "/v1/responses/resp_going"), ("POST", "/v1/responses/resp_going/cancel")):
            assert bob.ask(method, path).status_code == 404
        assert bob.ask("POST", "/v1/responses", {**RESPONSE, "previous_response_id": "resp_going"}).status_code == 404
        assert alice.ask("POST", "/v1/responses", {**RESPONSE, "previous_response_id": "resp_going"}).status_code == 409
        at_once = {"continuation_of": "going", "continuation_at": "now", "continuation_suffix": "x"}
        assert bob.generate(**at_once).status_code == 404
        assert bob.ask("POST", "/abort_request", {"rid": "going"}).status_code == 404
        assert bob.ask("DELETE", "/jobs/chat-going").status_code == 404
        # He ends all that is his, twice, and nothing of hers.
        assert bob.ask("POST", "/abort_request", {"abort_all": True}).json() == {"aborted": ["same"]}
        assert asked[1].result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert bob.ask("DELETE", "/jobs/same-job").json()["aborted"] == []
        assert alice.ask("GET", "/jobs/same-job").json()["open_requests"] == ["same"]
        assert admin.ask("POST", "/continue_generation", {}).status_code == 200
        assert asked[0].result().json()["meta_info"]["finish_reason"]["type"] == "length"
        assert more.result().json()["status"] in ("completed", "incomplete")
    child = alice.generate(continuation_of="same", continuation_suffix=" and").json()
    assert child["meta_info"]["continuation"]["path"] == "handoff"
    failed = bob.generate(continuation_of="same", continuation_suffix=" and")
    assert failed.status_code == 409 and "'same'" in failed.text and "/same" not in failed.text


@pytest.mark.process
def test_admin_can_act_on_objects_of_any_client(tenants: Tenants, hers: dict[str, str]) -> None:
    alice, bob, admin = tenants.alice, tenants.bob, tenants.admin
    assert alice.generate(rid="ended", text=TASK, retain_ttl=600, job_id="ended-job").status_code == 200
    assert admin.ask("GET", "/jobs/ended-job").status_code == 404, "it has no such job of its own"
    assert admin.ask("GET", "/jobs/ended-job?client=bob").status_code == 404
    assert admin.ask("GET", "/jobs/ended-job?client=alice").json()["pins"][0]["rid"] == "ended"
    assert admin.ask("GET", "/v1/responses/resp_said?client=alice").status_code == 200
    assert admin.ask("GET", "/jobs?client=alice&cache_salt=none").json() == {"jobs": []}
    assert admin.ask("GET", "/jobs?cache_salt=none").status_code == 400, "a salt names nothing without its client"
    child = {"continuation_of": "ended", "continuation_suffix": " and", "keep_parent": True, "rid": "by-the-admin"}
    assert admin.generate(**child).status_code == 404
    spoken = admin.ask("POST", "/generate?client=alice", {**child, "sampling_params": GREEDY})
    assert spoken.json()["meta_info"]["continuation"]["path"] == "handoff"
    assert alice.generate(continuation_of="by-the-admin", continuation_suffix="x").status_code == 200
    assert admin.ask("POST", "/release?client=alice", {"rid": "ended"}).json() == {"released": True}
    assert admin.ask("DELETE", "/jobs/ended-job?client=alice").json()["job_id"] == "ended-job"
    assert alice.ask("GET", "/jobs/ended-job").status_code == 404
    assert admin.ask("GET", "/jobs?client=carol").json()["error"]["code"] == "client_not_found"
    assert admin.ask("GET", "/jobs?client=alice&client=bob").status_code == 400
    refused = {bob.ask("GET", f"/jobs/job-1?client={name}").text for name in ("alice", "bob", "carol", "admin", "")}
    assert len(refused) == 1 and "admin_key_required" in refused.pop()


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("endpoint", sorted(ROUTES))
def test_endpoint_statuses_match_the_security_table(tenants: Tenants, hers: dict[str, str], endpoint: Endpoint) -> None:
    """What stands in the columns of anonymous, client and admin, by the status."""
    method, path = endpoint
    line, body = TABLE[endpoint], {} if method == "POST" else None
    path = re.sub("{.*?}", "nothing", path)
    if path == "/dashboard/events":  # a stream without an end
        statuses = [tenants.nobody.ask(method, path).status_code, tenants.bob.ask(method, path).status_code]
        assert statuses == [401, 403]
        return
    nobody, client = (each.ask(method, path, body).status_code for each in (tenants.nobody, tenants.bob))
    assert (nobody == 401) == (line.anonymous == "401")
    assert (client == 403) == (line.client == "403") and client != 401
    if path not in ("/pause_generation", "/item_tries"):
        assert tenants.admin.ask(method, path, body).status_code not in (401, 403)


@pytest.mark.process
@pytest.mark.parametrize(
    ("headers", "status", "who"),
    [
        ({"x_api_key": KEYS["bob"]}, 200, "bob"),
        ({"Authorization": f"Bearer {KEYS['bob']}", "x_api_key": KEYS["alice"]}, 200, "bob"),
        ({"Authorization": f"bearer {KEYS['bob']}"}, 401, ""),
        ({"Authorization": f"Bearer {KEYS['bob'].upper()}"}, 401, ""),
        ({"Authorization": "Bearer"}, 401, ""),
        ({"x_api_key": KEYS["bob"] * 500}, 401, ""),
        ({"x_api_key": "alice"}, 401, ""),
    ],
)
def test_key_headers_determine_the_client(
    tenants: Tenants, hers: dict[str, str], headers: dict[str, str], status: int, who: str
) -> None:
    rid = f"key-{len(str(headers))}"
    message = {**MESSAGE, "rid": rid}
    assert tenants.nobody.ask("POST", "/v1/messages", message, **headers).status_code == status
    if who:
        child = {"continuation_of": rid, "continuation_suffix": "x"}
        assert tenants.bob.generate(**child).status_code == 200 and tenants.alice.generate(**child).status_code == 404


@pytest.mark.process
def test_kv_is_shared_unless_clients_are_isolated(tenants: Tenants, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = "A prompt that nobody has sent before, as long as this line is."

    def cached(tenant: Tenant) -> int:
        return tenant.generate(text=text).json()["meta_info"]["cached_tokens"]

    assert cached(tenants.alice) == 0 and cached(tenants.bob) > 10 and cached(tenants.alice) > 10
    for isolated in serving(tmp_path_factory.mktemp("isolated"), "--isolate-clients"):
        assert [cached(each) > 0 for each in (isolated.alice, isolated.bob, isolated.bob)] == [False, False, True]
        nodes = isolated.admin.ask("GET", "/cache/tree").json()["nodes"]
        assert {"alice/", "bob/"} <= {node["namespace"] for node in nodes}
        child = {"continuation_of": "mine", "continuation_suffix": " and"}
        assert isolated.bob.generate(rid="mine", text=text, job_id="j", retain_ttl=60).status_code == 200
        assert isolated.bob.generate(**child).json()["meta_info"]["continuation"]["path"] == "handoff"
        assert isolated.bob.ask("GET", "/jobs/j").status_code == 200
        assert isolated.alice.ask("GET", "/jobs/j").status_code == 404
