"""Each format, what is wrong with its items, and how it is found out."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from baton.entrypoints.analyze.log.formats import detect, make_reader
from baton.entrypoints.analyze.log.log_file import LogFile
from baton.entrypoints.analyze.log.log_reader import LogReader, ReadOptions, refuse_empty
from baton.entrypoints.analyze.log.logged_request import BadItem, LogError, LoggedRequest
from baton.entrypoints.analyze.log.prompt_text import PromptText
from baton.runtime.text.tokenizer import Tokenizer

DEFAULT = ReadOptions()
TOY_MODEL = Path(__file__).parents[4] / "examples" / "toy_model"


@pytest.fixture(scope="module")
def toy() -> PromptText:
    return PromptText(Tokenizer.load(TOY_MODEL))


def ids(*values: int) -> bytes:
    return array("i", values).tobytes()


def only(item: Any, text: PromptText | None = None, name: str | None = None, page: int | None = None) -> LoggedRequest:
    (request,) = make_reader(name or str(detect(item)), text or PromptText(), page, None).read_item(item)
    return request


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ({"input_ids": [1]}, "requests"),
        ({"text": "x"}, "requests"),
        ({"messages": []}, "requests"),
        ({"input_blocks": "", "block_tokens": 16}, "requests"),
        ({"baton_request_log": 1}, "requests"),
        ({"id": "1", "conversations": []}, "sharegpt"),
        ({"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1]}, "mooncake"),
        ({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}, "openai-batch"),
        ({"prompt": "x"}, None),
        ([1, 2], None),
        ("x", None),
    ],
)
def test_log_format_is_detected_from_an_item(item: Any, name: str | None) -> None:
    assert detect(item) == name


def test_token_id_items_are_read() -> None:
    item = {"input_ids": [1, 2, 3], "output_ids": [[4, 5], [6]], "time": 3, "seconds": 1.5, "namespace": "n"}
    more = {"state_points": [1, 2], "retain_states": 3, "finish": "abort"}
    request = only(item | {"continuation_of": "x", "no_reuse_from": 2, "cached_tokens": 1} | more)
    assert request == LoggedRequest(
        prompt=ids(1, 2, 3),
        prompt_tokens=3,
        outputs=(ids(4, 5), ids(6)),
        output_tokens=3,
        has_outputs=True,
        time=3.0,
        seconds=1.5,
        namespace="n",
        continues=True,
        hinted=True,
        cached_tokens=1,
        state_points=(1, 2),
        retain_states=3,
        is_aborted=True,
    )
    assert only({"input_ids": [1], "output_ids": [2, 3]}).outputs == (ids(2, 3),)


def test_texts_are_bytes_without_tokenizer_and_token_ids_with_one(toy: PromptText) -> None:
    item = {"text": "How many lines?", "output_text": " 12"}
    plain = only(item)
    assert (plain.prompt, plain.outputs, plain.prompt_tokens, plain.output_tokens) == (
        b"How many lines?",
        (b" 12",),
        4,
        1,
    )
    tokens = only(item, toy)
    tokenizer = Tokenizer.load(TOY_MODEL)
    assert tokens.prompt == ids(*tokenizer.encode("How many lines?"))
    assert tokens.outputs == (ids(*tokenizer.encode_continuation(" 12")),)
    assert only({"text": "ü" * 10}).prompt_tokens == 5
    with_ids = only({"text": "How", "output_ids": [7, 8]}, toy)
    assert with_ids.prompt == ids(*tokenizer.encode("How"))


def test_chats_are_rendered_with_the_model_template(toy: PromptText) -> None:
    tokenizer = Tokenizer.load(TOY_MODEL)
    messages = [{"role": "user", "content": [{"type": "text", "text": "How many lines?"}]}]
    wanted = tokenizer.apply_chat_template([{"role": "user", "content": "How many lines?"}])
    assert only({"messages": messages}, toy).prompt == ids(*tokenizer.encode(wanted, False))
    assert only({"messages": messages}).prompt == b"<user>\nHow many lines?\n<assistant>\n"


def test_sharegpt_turns_extend_earlier_turns(toy: PromptText) -> None:
    said = [("human", "a?"), ("gpt", "b"), ("human", "c?"), ("gpt", "d"), ("human", "unanswered")]
    item = {"id": "x", "conversations": [{"from": who, "value": text} for who, text in said]}
    for text in (PromptText(), toy):
        first, second = make_reader("sharegpt", text, None, None).read_item(item)
        assert second.prompt.startswith(first.prompt) and len(second.prompt) > len(first.prompt + first.outputs[0])
        assert first.has_outputs and first.outputs[0]
    first, second = make_reader("sharegpt", PromptText(), None, None).read_item(item)
    assert second.prompt.startswith(first.prompt + first.outputs[0]), "the answer is part of the next prompt"


def test_mooncake_hash_ids_give_whole_blocks() -> None:
    item = {"timestamp": 27482, "input_length": 1500, "output_length": 52, "hash_ids": [46, 47, 2353]}
    request = only(item)
    assert request.prompt == array("q", [46, 47]).tobytes(), "the last block is not whole"
    assert (request.prompt_tokens, request.output_tokens, request.time) == (1500, 52, 27.482)
    reader = make_reader("mooncake", PromptText(), None, 750)
    with pytest.raises(BadItem, match="does not fit blocks of 750"):
        list(reader.read_item(item))


def test_openai_batch_lines_are_read(toy: PromptText) -> None:
    def line(**body: Any) -> dict[str, Any]:
        return {"custom_id": "1", "method": "POST", "url": "/v1/x", "body": body}

    assert only(line(messages=[{"role": "user", "content": "x"}])).prompt == b"<user>\nx\n<assistant>\n"
    assert only(line(prompt="x")).prompt == b"x"
    assert only(line(prompt=[1, 2]), toy).prompt == ids(1, 2)
    reader = make_reader("openai-batch", PromptText(), None, None)
    assert [each.prompt for each in reader.read_item(line(prompt=["x", "y"]))] == [b"x", b"y"]
    both = only(line(input="x", instructions="be short")).prompt
    assert both == b"<system>\nbe short\n<user>\nx\n<assistant>\n"


def test_hashed_block_items_are_read() -> None:
    item = {"input_tokens": 40, "output_tokens": 20, "block_tokens": 16}
    request = only(item | {"input_blocks": "00" * 16, "output_blocks": ["11" * 8]})
    assert request.prompt == bytes(16) and request.outputs == (b"\x11" * 8,) and request.prompt_tokens == 40


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ({"input_ids": [1, "x"]}, "input_ids is not a list of token ids"),
        ({"input_ids": [2**31]}, "input_ids is not a list of token ids"),
        ({"input_ids": [1.5]}, "input_ids is not a list of token ids"),
        ({"input_ids": []}, "its prompt is empty"),
        ({"text": ""}, "its prompt is empty"),
        ({"input_ids": [1], "state_points": [1, -1]}, "state_points is not a list"),
        ({"input_ids": [1], "state_points": ["1"]}, "state_points is not a list"),
        ({"input_ids": [1], "state_points": [1] * 1025}, "state_points is not a list of at most 1024"),
        ({"input_ids": [1], "retain_states": 1.5}, "retain_states is not a number"),
        ({"text": 3}, "text is not a string"),
        ({"text": "\ud800"}, "half a surrogate pair"),
        ({"messages": []}, "messages is not a list of messages"),
        ({"messages": [3]}, "a message has no role"),
        ({"messages": [{"role": "user", "content": 3}]}, "the content of a message is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "takes text only"),
        ({"input_blocks": "zz", "block_tokens": 16, "input_tokens": 16}, "not a string of hexadecimal digits"),
        ({"input_blocks": "00", "block_tokens": 16, "input_tokens": 16}, "cut short"),
        ({"input_blocks": "00" * 8}, "without block_tokens"),
        ({"input_blocks": "00" * 8, "block_tokens": 16, "input_tokens": -1}, "input_tokens is not a number of tokens"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "no answer with a prompt before it"),
        ({"conversations": [3]}, "a turn of conversations is not an object"),
        ({"conversations": [{"from": "gpt"}]}, "no from and value"),
        ({"conversations": "x"}, "its conversations is of the wrong kind"),
        ({"hash_ids": [1]}, "it has no input_length"),
        ({"hash_ids": [1.5], "input_length": 3}, "not a list of whole numbers"),
        ({"hash_ids": [2**63], "input_length": 3}, "not a list of whole numbers"),
        ({"hash_ids": [1], "input_length": True}, "its input_length is of the wrong kind"),
        ({"custom_id": "1", "body": {"model": "m"}}, "none of messages, prompt and input"),
        ({"custom_id": "1", "body": 3}, "its body is of the wrong kind"),
    ],
)
def test_malformed_items_are_rejected_with_reason(item: Any, reason: str) -> None:
    with pytest.raises(BadItem, match=reason):
        only(item)


def test_lone_surrogates_are_rejected(toy: PromptText) -> None:
    chat = {"messages": [{"role": "user", "content": "\udcff"}]}
    for item in ({"text": "\ud800"}, chat, {"text": "x", "output_text": "\udcff"}):
        for text in (toy, PromptText()):
            with pytest.raises(BadItem, match="half a surrogate pair"):
                only(item, text)


def read_log(tmp_path: Path, lines: list[Any], options: ReadOptions = DEFAULT) -> tuple[LogReader, int]:
    path = tmp_path / "log"
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    with LogFile(str(path)) as file:
        reader = LogReader(file, PromptText(), options)
        return reader, sum(1 for _ in reader.requests(lambda read: None))


def test_broken_items_are_counted_with_reasons(tmp_path: Path) -> None:
    lines = ["broken", {"prompt": 1}, {"input_ids": [1]}, {"text": "x"}, {"input_ids": []}, 7, {"input_ids": [2]}]
    reader, count = read_log(tmp_path, [*lines, "", *["{"] * 4])
    story = reader.story
    assert count == 2 and (story.format, story.items, story.bad) == ("requests", 11, 9)
    assert [number for number, _ in story.first_bad] == [1, 2, 4, 5, 6]
    reasons = [reason for _, reason in story.first_bad]
    assert "its format is none of" in reasons[1] and "made of text" in reasons[2]


def test_reading_stops_at_max_requests(tmp_path: Path) -> None:
    reader, count = read_log(tmp_path, [{"text": "x"}] * 9, ReadOptions(max_requests=4))
    assert count == 4 and "only the first 4 requests" in reader.story.notes[-1]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "is empty"),
        ([{"baton_request_log": 1, "holds": "ids"}], "has no requests yet"),
        (["x", {"prompt": 1}], "among 2 items; item 1: invalid JSON"),
    ],
)
def test_log_without_requests_is_refused(tmp_path: Path, lines: list[Any], reason: str) -> None:
    reader, count = read_log(tmp_path, lines)
    assert count == 0 and reason in str(refuse_empty(reader))


@pytest.mark.parametrize(
    ("item", "options", "reason"),
    [
        ({"hash_ids": [1], "input_length": 3}, ReadOptions(page_size=16), "--page-size"),
        ({"text": "x"}, ReadOptions(block_tokens=16), "--block-tokens is for logs in the format mooncake"),
    ],
)
def test_options_unsupported_by_a_format_are_refused(
    tmp_path: Path, item: dict[str, Any], options: ReadOptions, reason: str
) -> None:
    with pytest.raises(LogError, match=reason):
        read_log(tmp_path, [item], options)


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), float("inf"), float("-inf"), float("nan"), 1e300], ids=lambda value: str(value)[:5]
)
@pytest.mark.parametrize(
    ("item", "names"),
    [
        ({"input_ids": [1]}, ["time", "seconds"]),
        ({"hash_ids": [1], "input_length": 3}, ["timestamp"]),
    ],
)
def test_out_of_range_times_are_rejected(item: dict[str, Any], names: list[str], value: float) -> None:
    for name in names:
        with pytest.raises(BadItem, match=f"its {name} is out of range"):
            only(item | {name: value})


def test_oversized_token_counts_are_rejected() -> None:
    blocks = {"input_blocks": "", "block_tokens": 16, "input_tokens": 1, "output_tokens": 10**400}
    mooncake = {"hash_ids": [1], "input_length": 3, "output_length": 10**400}
    for item in ({"input_ids": [1], "cached_tokens": 10**400}, blocks, mooncake):
        with pytest.raises(BadItem, match="is not a number of tokens"):
            only(item)
