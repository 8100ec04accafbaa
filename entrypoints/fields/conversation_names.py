"""Reads which conversation a request belongs to, from the headers of agent programs and from fields that other servers
use as labels. A conversation is a job of the scheduler.

    job_id, X-Job-Id    names the job itself: nothing else is read
    a strong name       one conversation: a session and its agent, conversation_id, …; it is a job
    a shared name       may be one of many conversations: prompt_cache_key, user, …; chats read it with the first
                        message of the user (chat/named_jobs.py), plain prompts do not

A job's id begins with the source of its name, so that names from different sources never meet. No value is refused
here: names that are empty or have the wrong type name nothing, and long ones are replaced by a digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from ..description.json_schema import Properties, string
from .namespaces import MAX_KEY_CHARS, namespace_of

MAX_NAME_CHARS = 128
"""A longer name is replaced by its digest."""

DYNAMO_SESSION, DYNAMO_PARENT, DYNAMO_FINAL = (
    "X-Dynamo-Session-ID",
    "X-Dynamo-Parent-Session-ID",
    "X-Dynamo-Session-Final",
)
CLAUDE_SESSION, CLAUDE_AGENT, CLAUDE_PARENT = (
    "X-Claude-Code-Session-Id",
    "X-Claude-Code-Agent-Id",
    "X-Claude-Code-Parent-Agent-Id",
)
CODEX_SESSION, CODEX_THREAD, CODEX_PARENT = "Session-Id", "Thread-Id", "X-Codex-Parent-Thread-Id"
OLD_CODEX_SESSION = "session_id"
"""Older versions of Codex spell the header so."""
SESSION, PARENT_SESSION = "X-Session-Id", "X-Parent-Session-Id"
ROUTING_KEY, AFFINITY = "X-SMG-Routing-Key", "X-Session-Affinity"

NAME_HEADERS: Properties = {
    DYNAMO_SESSION: string("The conversation, as NVIDIA Dynamo's clients name it; used where there is no job_id."),
    DYNAMO_PARENT: string("The conversation that started this one."),
    DYNAMO_FINAL: string("true: is_last_step, where the conversation has a name of its own."),
    CLAUDE_SESSION: string("Claude Code's session."),
    CLAUDE_AGENT: string("The subagent in that session."),
    CLAUDE_PARENT: string("The subagent that started this one; without it, the session's main agent did."),
    CODEX_SESSION: string("Codex's session."),
    CODEX_THREAD: string("The thread in that session: its main agent, or a subagent."),
    CODEX_PARENT: string("The thread that started this one."),
    SESSION: string("The conversation, as opencode names it."),
    PARENT_SESSION: string("The conversation that started this one."),
    ROUTING_KEY: string("As the field routing_key."),
    AFFINITY: string("A name that several conversations may have, as opencode sends it beside X-Session-Id."),
}
"""For ``/openapi.json``."""


@dataclass(frozen=True, slots=True)
class ConversationNames:
    """job_id: of a strong name. parent_job_id: the job that started it. is_last_step: it ends with this request.
    shared: a shared name, with its source; at most one of it and job_id is set."""

    job_id: str | None = None
    parent_job_id: str | None = None
    is_last_step: bool = False
    shared: str | None = None


NO_NAMES = ConversationNames()


class _Named(NamedTuple):
    job_id: str
    parent: str | None = None


def read_names(fields: Mapping[str, Any], headers: Mapping[str, str]) -> ConversationNames:
    """The names in a request. fields: of its body, and what headers and ``extra_body`` added to it (`with_extras`).
    headers: by lower-case name."""
    if fields.get("job_id") is not None:
        return NO_NAMES
    given = _Headers(headers)
    named = _of_dynamo(given) or _of_claude_code(given) or _of_codex(given) or _of_session(given) or _of_body(fields)
    if named is None:
        return ConversationNames(shared=_shared(fields, given))
    parent = named.parent if named.parent != named.job_id else None
    return ConversationNames(named.job_id, parent, is_last_step=given.is_set(DYNAMO_FINAL))


class _Headers:
    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers

    def name(self, header: str) -> str | None:
        value = self._headers.get(header.lower())
        return None if value is None else _name(as_utf8(value))

    def is_set(self, header: str) -> bool:
        return self._headers.get(header.lower(), "").strip().lower() in ("true", "1")


def as_utf8(given: str) -> str:
    """The text of a header. The framework decodes its bytes as latin-1; most clients send UTF-8."""
    try:
        return given.encode("latin-1").decode()
    except UnicodeError:
        return given


def _name(value: Any) -> str | None:
    """A value as a part of a job's id; None if it names nothing."""
    if not isinstance(value, str):
        return None
    name = value.strip()
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        return digest_of(name)
    return name or None


def digest_of(*texts: str) -> str:
    """32 hex digits; equal only where all texts are."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


# -- strong names ------------------------------------------------------------------------------------------------------


def _of_dynamo(headers: _Headers) -> _Named | None:
    return _session("dynamo", headers.name(DYNAMO_SESSION), headers.name(DYNAMO_PARENT))


def _of_session(headers: _Headers) -> _Named | None:
    return _session("session", headers.name(SESSION), headers.name(PARENT_SESSION))


def _session(source: str, session: str | None, parent: str | None) -> _Named | None:
    if session is None:
        return None
    return _Named(f"{source}:{session}", None if parent is None else f"{source}:{parent}")


def _of_claude_code(headers: _Headers) -> _Named | None:
    """The session's main agent has no id of its own. Subagents have one, and its parent's if that is a subagent too."""
    session = headers.name(CLAUDE_SESSION)
    if session is None:
        return None
    agent, parent = headers.name(CLAUDE_AGENT), headers.name(CLAUDE_PARENT)
    main = _claude_code_agent(session)
    if agent is None:
        return _Named(main)
    return _Named(_claude_code_agent(session, agent), main if parent is None else _claude_code_agent(session, parent))


def _claude_code_agent(session: str, agent: str | None = None) -> str:
    session = digest_of(session) if "/" in session else session
    return f"claude-code:{session}" if agent is None else f"claude-code:{session}/{agent}"


def _of_codex(headers: _Headers) -> _Named | None:
    """The main agent's thread has the session's id. A subagent has a thread of its own."""
    session = headers.name(CODEX_SESSION) or headers.name(OLD_CODEX_SESSION)
    thread = headers.name(CODEX_THREAD) or session
    if thread is None:
        return None
    return _session("codex", thread, headers.name(CODEX_PARENT) or session)


def _of_body(fields: Mapping[str, Any]) -> _Named | None:
    conversation = fields.get("conversation")
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    for source, value in (
        ("conversation", conversation),
        ("conversation-id", fields.get("conversation_id")),
        ("session-id", fields.get("session_id")),
    ):
        if (name := _name(value)) is not None:
            return _Named(f"{source}:{name}")
    metadata = fields.get("metadata")
    session = _session_of_user(metadata.get("user_id")) if isinstance(metadata, dict) else None
    return None if session is None else _Named(_claude_code_agent(session))


def _session_of_user(user_id: Any) -> str | None:
    """The session in Claude Code's ``metadata.user_id``: ``user_…_account_…_session_UUID``, in later versions the JSON
    of an object that has a ``session_id``."""
    if not isinstance(user_id, str) or len(user_id) > MAX_KEY_CHARS:
        return None
    if user_id.startswith("user_"):
        user, found, session = user_id.rpartition("_session_")
        return _name(session) if found and "_account_" in user else None
    if not user_id.startswith("{"):
        return None
    try:
        given = msgspec.json.decode(user_id)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return _name(given.get("session_id")) if isinstance(given, dict) else None


# -- shared names ------------------------------------------------------------------------------------------------------


def _shared(fields: Mapping[str, Any], headers: _Headers) -> str | None:
    """The most particular one."""
    if (name := _name(fields.get("prompt_cache_key"))) is not None:
        return f"prompt-cache-key:{name}"
    if (name := _name(fields.get("routing_key")) or headers.name(ROUTING_KEY)) is not None:
        return f"routing-key:{name}"
    if (name := headers.name(AFFINITY)) is not None:
        return f"affinity:{name}"
    metadata = fields.get("metadata")
    user = fields.get("user") or (metadata.get("user_id") if isinstance(metadata, dict) else None)
    return f"user:{namespace_of(user)}" if isinstance(user, str) and user.strip() else None
