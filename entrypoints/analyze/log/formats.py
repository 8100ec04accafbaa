"""The formats of logs. Each reader turns an item into requests; the first good item tells a log's format.

requests
    An object with ``text``, ``messages``, ``input_ids`` or ``input_blocks``, as --record-requests writes it.
sharegpt
    ``{"id", "conversations": [{"from", "value"}, …]}``, as in the ShareGPT collection: a request for each answer.
mooncake
    ``{"timestamp", "input_length", "output_length", "hash_ids"}``, as in Mooncake's traces: an id stands for a block
    and everything before it.
openai-batch
    ``{"custom_id", "method", "url", "body"}``, a line of a batch file.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, Protocol

from .logged_request import BadItem, LogError, LoggedRequest, Units
from .prompt_text import PromptText
from .recorded import MAX_NUMBER, RequestReader, number

MOONCAKE_BLOCK = 512
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
"""ShareGPT's names of roles -> those of chat templates; other names stay."""


class Reader(Protocol):
    """Reads the items of one log."""

    notes: list[str]
    """Limitations of the format, for the report."""

    @property
    def units(self) -> Units | None:
        """None before the first request."""
        ...

    def read_item(self, item: Any) -> Iterator[LoggedRequest]:
        """The requests of an item, in order. Raises BadItem."""
        ...


class ShareGPTReader:
    """Conversations: each answer is a request, with everything before it as its prompt."""

    def __init__(self, text: PromptText, page_size: int) -> None:
        self.units = text.units(page_size)
        self.notes = ["conversations have no times: the turns of each count as following each other at once"]
        self._text = text

    def read_item(self, item: Any) -> Iterator[LoggedRequest]:
        turns = _field(item, "conversations", list)
        messages: list[dict[str, str]] = []
        answered = False
        for turn in turns:
            if not isinstance(turn, dict):
                raise BadItem("a turn of conversations is not an object")
            role = turn.get("from", turn.get("role"))
            said = turn.get("value", turn.get("content"))
            if not isinstance(role, str) or not isinstance(said, str):
                raise BadItem("a turn of conversations has no from and value")
            role = ROLES.get(role, role)
            if role == "assistant" and messages:
                answered = True
                prompt, output = self._text.encode_chat(messages), self._text.encode_output(said)
                yield LoggedRequest(
                    prompt=prompt,
                    prompt_tokens=self._text.num_tokens(prompt),
                    outputs=(output,),
                    output_tokens=self._text.num_tokens(output),
                    has_outputs=True,
                )
            messages.append({"role": role, "content": said})
        if not answered:
            raise BadItem("the conversation has no answer with a prompt before it")


class MooncakeReader:
    """Blocks by their ids; an id stands for the block and everything before it."""

    def __init__(self, block_tokens: int) -> None:
        self.units = Units(8, block_tokens, f"blocks of {block_tokens} tokens, by the log's ids")
        self.notes = ["the log has no outputs: their memory is not counted, and turns are found by their prompts alone"]
        self._block = block_tokens

    def read_item(self, item: Any) -> Iterator[LoggedRequest]:
        length, ids = _field(item, "input_length", int), _field(item, "hash_ids", list)
        if length < 1 or len(ids) != -(-length // self._block):
            raise BadItem(
                f"input_length {length} with {len(ids)} hash_ids does not fit blocks of {self._block} (--block-tokens)"
            )
        try:
            key = array("q", ids).tobytes()
        except (TypeError, OverflowError):
            raise BadItem("hash_ids is not a list of whole numbers") from None
        output = item.get("output_length", 0)
        if isinstance(output, int) and not 0 <= output <= MAX_NUMBER:
            raise BadItem("its output_length is not a number of tokens")
        at = number(item, "timestamp")
        yield LoggedRequest(
            prompt=key[: length // self._block * 8],
            prompt_tokens=length,
            output_tokens=output if isinstance(output, int) else 0,
            time=at / 1000 if at is not None else None,
        )


class BatchReader:
    """OpenAI's batch files: the body of each line is a request to one of the APIs."""

    def __init__(self, text: PromptText, page_size: int) -> None:
        self.notes = ["a batch file has no answers and no times"]
        self._requests = RequestReader(text, page_size)

    @property
    def units(self) -> Units | None:
        return self._requests.units

    def read_item(self, item: Any) -> Iterator[LoggedRequest]:
        body = _field(item, "body", dict)
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            body = {"text": prompt}
        elif isinstance(prompt, list):
            many = prompt if prompt and isinstance(prompt[0], list | str) else [prompt]
            for each in many:
                yield from self._requests.read_item({"text" if isinstance(each, str) else "input_ids": each})
            return
        elif "messages" not in body:
            body = {"messages": _responses_messages(body)}
        yield from self._requests.read_item(body)


def _responses_messages(body: dict[str, Any]) -> list[Any]:
    """The messages in a body of /v1/responses or /v1/embeddings. Raises BadItem."""
    asked = body.get("input")
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list):
        raise BadItem("its body has none of messages, prompt and input")
    instructions = body.get("instructions")
    return ([{"role": "system", "content": instructions}] if isinstance(instructions, str) else []) + asked


FORMATS = ("requests", "sharegpt", "mooncake", "openai-batch")


def detect(item: Any) -> str | None:
    """The format of an item, or None."""
    if not isinstance(item, dict):
        return None
    if "hash_ids" in item:
        return "mooncake"
    if "body" in item and ("custom_id" in item or "url" in item):
        return "openai-batch"
    if "conversations" in item:
        return "sharegpt"
    if RequestReader.knows(item):
        return "requests"
    return None


def make_reader(name: str, text: PromptText, page_size: int | None, block_tokens: int | None) -> Reader:
    """page_size, block_tokens: None for the format's own. Raises LogError for a setting that the format does not
    have."""
    if name == "mooncake":
        if page_size is not None:
            raise LogError("--page-size: this log has blocks of its own size; see --block-tokens")
        return MooncakeReader(block_tokens or MOONCAKE_BLOCK)
    if block_tokens is not None:
        raise LogError(f"--block-tokens is for logs in the format mooncake; this one has the format {name}")
    if name == "sharegpt":
        return ShareGPTReader(text, page_size or 1)
    if name == "openai-batch":
        return BatchReader(text, page_size or 1)
    return RequestReader(text, page_size)


def _field(item: Any, name: str, kind: type) -> Any:
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadItem(f"it has no {name}" if value is None else f"its {name} is of the wrong kind")
    return value
