"""Programs on an Engine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....runtime.text.chat_template import ChatTemplate, ChatTemplateError
from ....scheduler.outcome import RequestRefused
from ...engine import Engine, EngineError
from ...http_statuses import status_of
from ..errors import BackendError
from .backend import NO_TEMPLATE, whole_outputs


class EngineBackend:
    """An Engine in this process. The caller shuts it down."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def generate(self, fields: dict[str, Any]) -> Any:
        with _EngineErrors():
            return self.engine.generate(**fields)

    def stream(self, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with _EngineErrors():
            outputs = self.engine.generate(**fields, stream=True)
            yield from whole_outputs(outputs) if self.engine.args.server.incremental_streaming_output else outputs

    def abort(self, rid: str) -> None:
        with _EngineErrors():
            self.engine.abort(rid)

    def release(self, rid: str) -> None:
        with _EngineErrors():
            self.engine.release(rid)

    def get_server_info(self) -> dict[str, Any]:
        return self.engine.get_server_info()

    def flush_cache(self) -> None:
        with _EngineErrors():
            self.engine.flush_cache()

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.engine.encode(text, add_special_tokens=add_special_tokens)

    def chat_template(self) -> ChatTemplate:
        template = self.engine.tokenizer.chat_template
        if template is None:
            raise ChatTemplateError(NO_TEMPLATE)
        return template


class _EngineErrors:
    """Turns an Engine's errors into BackendErrors."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, RequestRefused):
            raise BackendError(error.message, status=status_of(error), code=error.code) from error
        if isinstance(error, EngineError):
            raise BackendError(str(error)) from error
        return False
