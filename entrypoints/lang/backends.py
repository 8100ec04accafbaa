"""Backends that run programs: a server over HTTP, or an Engine in this process. Both take the fields of
``POST /generate``."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any, Protocol, runtime_checkable

from ...runtime.text.chat_template import ChatTemplate, ChatTemplateError
from ...scheduler.outcome import RequestRefused
from ..engine import Engine, EngineError
from .errors import BackendError


@runtime_checkable
class Backend(Protocol):
    """The calls that a program makes to a server, from many threads at once. Failures raise BackendError."""

    def generate(self, fields: dict[str, Any]) -> Any:
        """The answer: a dict {text, output_ids, meta_info}, or a list of them for a batch or n > 1."""
        ...

    def stream(self, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields growing answers, each with the whole output so far."""
        ...

    def abort(self, rid: str) -> None:
        """End an open request; nothing happens if there is none."""
        ...

    def release(self, rid: str) -> None:
        """Give up the leases of a finished request; nothing happens if there are none."""
        ...

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def chat_template(self) -> ChatTemplate:
        """The model's chat template. Raises ChatTemplateError if it has none."""
        ...


def as_backend(given: Any) -> Backend:
    """Makes a backend from an Engine or a server's URL; returns a backend unchanged."""
    if isinstance(given, Engine):
        return EngineBackend(given)
    if isinstance(given, str):
        return HttpBackend(given)
    if isinstance(given, Backend):
        return given
    raise TypeError(f"backend is {given!r}; give an Engine, the URL of a server, or an object with Backend's methods")


class EngineBackend:
    """An Engine in this process. The caller shuts it down."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def generate(self, fields: dict[str, Any]) -> Any:
        with _engine_errors():
            return self.engine.generate(**fields)

    def stream(self, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with _engine_errors():
            outputs = self.engine.generate(**fields, stream=True)
            yield from _whole(outputs) if self.engine.args.server.incremental_streaming_output else outputs

    def abort(self, rid: str) -> None:
        with _engine_errors():
            self.engine.abort(rid)

    def release(self, rid: str) -> None:
        with _engine_errors():
            self.engine.release(rid)

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.engine.encode(text, add_special_tokens=add_special_tokens)

    def chat_template(self) -> ChatTemplate:
        template = self.engine.tokenizer.chat_template
        if template is None:
            raise ChatTemplateError(_NO_TEMPLATE)
        return template


class HttpBackend:
    """A server at ``url``. timeout_s: how long it may be silent; without streaming that includes all generation."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._lock = threading.Lock()
        self._incremental: bool | None = None
        self._template: ChatTemplate | None = None

    def generate(self, fields: dict[str, Any]) -> Any:
        return self._call("/generate", fields)

    def stream(self, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._lock:
            if self._incremental is None:
                self._incremental = bool(self._call("/server_info")["incremental_streaming_output"])
        events = self._events("/generate", {**fields, "stream": True})
        return _whole(events) if self._incremental else events

    def abort(self, rid: str) -> None:
        self._call("/abort_request", {"rid": rid}, but=404)

    def release(self, rid: str) -> None:
        self._call("/release", {"rid": rid})

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._call("/tokenize", {"prompt": text, "add_special_tokens": add_special_tokens})["tokens"]

    def chat_template(self) -> ChatTemplate:
        with self._lock:
            if self._template is None:
                info = self._call("/model_info")
                source = info.get("chat_template")
                if source is None:
                    raise ChatTemplateError(_NO_TEMPLATE)
                self._template = ChatTemplate(source, info["special_tokens"])
            return self._template

    def _call(self, path: str, body: dict[str, Any] | None = None, *, but: int | None = None) -> Any:
        """The JSON answer of a path; None for an error of status ``but``."""
        try:
            with self._open(path, body) as response:
                return json.load(response)
        except BackendError as error:
            if error.status != but:
                raise
            return None
        except (OSError, HTTPException, ValueError) as error:
            raise self._broken(path, error) from error

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Server-sent events. Leaving the iteration closes the connection, which aborts the request."""
        with self._open(path, body) as response:
            try:
                for line in response:
                    data = line.strip().removeprefix(b"data: ")
                    if data == b"[DONE]":
                        return
                    if not data:
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise _server_error(0, event)
                    yield event
            except (OSError, HTTPException, ValueError) as error:
                raise self._broken(path, error) from error
        raise BackendError(f"{self.url}{path}: the stream ended before the answer did")

    def _open(self, path: str, body: dict[str, Any] | None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self._headers)
        try:
            return urllib.request.urlopen(request, timeout=self.timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise _server_error(error.code, error.read()) from None
        except (OSError, HTTPException) as error:
            raise self._broken(path, error) from error

    def _broken(self, path: str, error: Exception) -> BackendError:
        reason = getattr(error, "reason", None) or error
        return BackendError(f"{self.url}{path} did not answer: {type(error).__name__}: {reason}")


_NO_TEMPLATE = "this model has no chat template; write the text of the roles yourself"


def _server_error(status: int, body: bytes | dict[str, Any]) -> BackendError:
    """The BackendError for an error answer, with the server's own message if it can be read."""
    try:
        error = (json.loads(body) if isinstance(body, bytes) else body)["error"]
        return BackendError(str(error["message"]), status=status, code=error.get("code") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return BackendError(f"status {status}: {body!r:.500}", status=status)


class _engine_errors:
    """Turns an Engine's errors into BackendErrors."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, RequestRefused):
            raise BackendError(error.message, status=error.status, code=error.code) from error
        if isinstance(error, EngineError):
            raise BackendError(str(error)) from error
        return False


def _whole(events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Turns events that hold only what is new into events with the whole output so far."""
    text, output_ids, logprobs = "", [], {}
    for event in events:
        text += event["text"]
        output_ids = output_ids + event["output_ids"]
        meta = event["meta_info"]
        logprobs = {name: logprobs.get(name, []) + meta[name] for name in meta if name.endswith("logprobs")}
        yield {**event, "text": text, "output_ids": output_ids, "meta_info": {**meta, **logprobs}}
