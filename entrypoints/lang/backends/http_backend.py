"""Programs on a server, over HTTP."""

from __future__ import annotations

import json
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any

from ....runtime.text.chat_template import ChatTemplate, ChatTemplateError
from ..errors import BackendError
from .backend import NO_TEMPLATE, whole_outputs


class HttpBackend:
    """A server at ``url``. timeout_s: longest silence of the server; without streaming that includes all generation.
    ca_file: certificates (PEM) to trust instead of the system's, for https."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0, ca_file: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._tls = None if ca_file is None else ssl.create_default_context(cafile=ca_file)
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
                self._incremental = bool(self.get_server_info()["incremental_streaming_output"])
        events = self._events("/generate", {**fields, "stream": True})
        return whole_outputs(events) if self._incremental else events

    def abort(self, rid: str) -> None:
        self._call("/abort_request", {"rid": rid}, but=404)

    def release(self, rid: str) -> None:
        self._call("/release", {"rid": rid})

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._call("/tokenize", {"prompt": text, "add_special_tokens": add_special_tokens})["tokens"]

    def chat_template(self) -> ChatTemplate:
        with self._lock:
            if self._template is None:
                info = self.get_model_info()
                source = info.get("chat_template")
                if source is None:
                    raise ChatTemplateError(NO_TEMPLATE)
                self._template = ChatTemplate(source, info["special_tokens"])
            return self._template

    def get_model_info(self) -> dict[str, Any]:
        """The server's model: model_path, context_length, chat_template, …"""
        return self._call("/model_info")

    def get_server_info(self) -> dict[str, Any]:
        """The server's settings, and the worker's current report."""
        return self._call("/server_info")

    def flush_cache(self) -> None:
        """Forget all cached prefixes. The server refuses it while requests run."""
        self._call("/flush_cache", {})

    def start_profile(self) -> None:
        """Record where steps spend their time, until `stop_profile`."""
        self._call("/start_profile", {})

    def stop_profile(self) -> dict[str, Any]:
        """The profile of the steps since `start_profile`."""
        return self._call("/stop_profile", {})

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
        data = None if body is None else _encoded(body)
        request = urllib.request.Request(self.url + path, data=data, headers=self._headers)
        try:
            return urllib.request.urlopen(request, timeout=self.timeout_s, context=self._tls)
        except urllib.error.HTTPError as error:
            with error:
                raise _server_error(error.code, error.read()) from None
        except (OSError, HTTPException) as error:
            raise self._broken(path, error) from error

    def _broken(self, path: str, error: Exception) -> BackendError:
        reason = getattr(error, "reason", None) or error
        return BackendError(f"{self.url}{path} did not answer: {type(error).__name__}: {reason}")


class RuntimeEndpoint(HttpBackend):
    """An `HttpBackend` under SGLang's name and with its methods, which reads the model's info at once. ``verify``: a
    file of certificates (PEM) to trust.

    Raises BackendError if the server does not answer, and ValueError for a chat template by name.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        if chat_template_name is not None:
            raise ValueError(
                f"RuntimeEndpoint: chat_template_name is {chat_template_name!r}; roles are written by the model's own "
                "template, and there is no table of others: leave it out, or put a chat_template.jinja into "
                "the model's folder"
            )
        super().__init__(base_url, api_key=api_key, ca_file=verify)
        self.model_info: dict[str, Any] = self.get_model_info()

    @property
    def base_url(self) -> str:
        return self.url

    def get_model_name(self) -> str:
        """The path of the model that the server loaded."""
        return self.model_info["model_path"]

    def cache_prefix(self, prefix_str: str) -> None:
        """Have the server compute this text, so that the prompts which begin with it find it in the cache."""
        self.generate({"text": prefix_str, "sampling_params": {"max_new_tokens": 1}})


def _encoded(body: dict[str, Any]) -> bytes:
    """The JSON of a request, numbers of numpy included. Raises BackendError for what JSON cannot hold."""
    try:
        return json.dumps(body, allow_nan=False, ensure_ascii=False, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BackendError(f"the request cannot be written as JSON: {error}") from error


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy, torch
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a type of JSON")


def _server_error(status: int, body: bytes | dict[str, Any]) -> BackendError:
    """The BackendError for an error answer, with the server's own message if it can be read."""
    try:
        error = (json.loads(body) if isinstance(body, bytes) else body)["error"]
        return BackendError(str(error["message"]), status=status, code=error.get("code") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return BackendError(f"status {status}: {body!r:.500}", status=status)
