"""Texts and chats of a log -> keys: token ids with a tokenizer, the text's bytes without."""

from __future__ import annotations

from array import array
from typing import Any

from ....runtime.text.tokenizer import Tokenizer
from ....scheduler.outcome import RequestRefused
from ...chat.messages import Conversation, join_parts
from ...chat.rendering import Renderer
from ...chat.template_choice import ChatTemplates, choose_templates
from .logged_request import BadItem, Units

ID_BYTES = 4
BYTES_PER_TOKEN = 4
"""Bytes that count as a token without a tokenizer: about the average of English text."""


class PromptText:
    """tokenizer: None to use bytes. renderer: by default of the tokenizer's chat template; unused without a
    tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        renderer: Renderer | None = None,
        bytes_per_token: int = BYTES_PER_TOKEN,
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer or Renderer(
            choose_templates(tokenizer) if tokenizer is not None else ChatTemplates(None, None)
        )
        self._bytes_per_token = bytes_per_token

    @property
    def has_tokens(self) -> bool:
        """True if texts become token ids."""
        return self._tokenizer is not None

    def units(self, page_size: int) -> Units:
        """Units of the keys, for pages of ``page_size`` tokens."""
        if self.has_tokens:
            return id_units(page_size)
        bytes_per_token = self._bytes_per_token
        what = f"text, of which {bytes_per_token} bytes count as a token"
        return Units(page_size * bytes_per_token, page_size, what)

    def num_tokens(self, key: bytes) -> int:
        return -(-len(key) // (ID_BYTES if self.has_tokens else self._bytes_per_token))

    def encode(self, text: str, *, special: bool = True) -> bytes:
        """The key of a prompt's text. special: with the special tokens that go around a prompt. Raises BadItem."""
        data = _utf8(text, "text")
        return data if self._tokenizer is None else array("i", self._tokenizer.encode(text, special)).tobytes()

    def encode_output(self, text: str) -> bytes:
        """The key of an output, which follows its prompt. Raises BadItem."""
        data = _utf8(text, "output")
        return data if self._tokenizer is None else array("i", self._tokenizer.encode_continuation(text)).tobytes()

    def encode_chat(self, messages: Any, tools: Any = None) -> bytes:
        """The key of a chat, up to where the assistant is to answer. Raises BadItem."""
        plain = _plain(messages)
        if self._tokenizer is None:
            return _utf8("".join(f"<{each['role']}>\n{each['content']}\n" for each in plain) + "<assistant>\n", "chat")
        try:
            conversation = Conversation(messages=plain, tools=tools if isinstance(tools, list) and tools else None)
            return self.encode(self._renderer.render(conversation), special=False)
        except RequestRefused as error:
            raise BadItem(error.message) from None


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadItem(f"its {what} has half a surrogate pair, which UTF-8 cannot encode") from None


def id_units(page_size: int) -> Units:
    return Units(page_size * ID_BYTES, page_size, "token ids" if page_size == 1 else f"token ids, pages of {page_size}")


def key_of_ids(ids: Any, name: str) -> bytes:
    """int32 bytes of a list of token ids. Raises BadItem."""
    if isinstance(ids, list):
        try:
            return array("i", ids).tobytes()
        except (TypeError, OverflowError):
            pass
    raise BadItem(f"{name} is not a list of token ids")


def _plain(messages: Any) -> list[dict[str, Any]]:
    """The messages, each with its content as one string. Raises BadItem."""
    if not isinstance(messages, list) or not messages:
        raise BadItem("messages is not a list of messages")
    plain = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise BadItem("a message has no role")
        content = message.get("content")
        if isinstance(content, list):
            try:
                content = join_parts(content, "content")
            except RequestRefused as error:
                raise BadItem(error.message) from None
        if content is not None and not isinstance(content, str):
            raise BadItem("the content of a message is not text")
        plain.append({**message, "content": content or ""})
    return plain
