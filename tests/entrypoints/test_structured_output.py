"""Outputs that must fulfil a form, on the trained toy model, through every API; and what is refused."""

from __future__ import annotations

import concurrent.futures
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import anthropic
import jsonschema_rs
import numpy as np
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from baton.runtime.text.tokenizer import Tokenizer
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"


class Town(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    kind: Literal["village", "city"]
    people: int = Field(ge=0, le=9_000_000)
    mayors: list[Annotated[str, Field(max_length=8)]] = Field(max_length=2)


SCHEMA = Town.model_json_schema()
SMALL = {
    "type": "object",
    "properties": {"kind": {"enum": ["one", "two"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
ITEMS = ["".join(item["tokens"]) for item in json.loads((TOY_MODEL / "catalogue.json").read_text())]
SAMPLING = {"max_new_tokens": 300, "temperature": 0.0}
ASKED: Any = [{"role": "user", "content": "How many lines are in notes.txt?"}]
COUNT: Any = {
    "name": "count",
    "description": "Counts lines.",
    "parameters": {
        "type": "object",
        "properties": {"file": {"type": "string", "maxLength": 12}, "kind": {"enum": ["lines", "words"]}},
        "required": ["file", "kind"],
        "additionalProperties": False,
    },
}
NOTE: Any = {
    "name": "note",
    "parameters": {"type": "object", "properties": {"text": {"type": "string", "maxLength": 20}}, "required": ["text"],
                   "additionalProperties": False},
}  # fmt: skip
TOOLS: Any = [{"type": "function", "function": {**tool, "strict": True}} for tool in (COUNT, NOTE)]


@pytest.fixture(scope="module", params=["plain", "overlapped"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    folder = tmp_path_factory.mktemp("server")
    np.save(folder / "items.npy", np.array([Tokenizer.load(TOY_MODEL).encode(item, False) for item in ITEMS]))
    flags = ["--max-total-tokens", "8192", "--dtype", "float32", "--device", "cpu", "--max-beam-width", "16",
             "--overlap-schedule", "on" if request.param == "overlapped" else "off",
             "--item-trie", f"catalogue={folder / 'items.npy'}"]  # fmt: skip
    with ServerUnderTest(TOY_MODEL, folder, *flags, behaviour=None) as running:
        yield running.wait_ready()


@pytest.fixture
def client(server: ServerUnderTest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def generate(server: ServerUnderTest, **sampling: Any) -> Any:
    answer = server.generate(text="A town: ", sampling_params={**SAMPLING, **sampling})
    assert answer.status_code == 200, answer.text
    return answer.json()


def valid(text: str, schema: Any = SCHEMA) -> bool:
    return jsonschema_rs.is_valid(schema, json.loads(text))


# -- /generate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["object", "text"])
def test_samples_fulfil_their_schema(server: ServerUnderTest, schema: Any) -> None:
    found = generate(server, json_schema=schema, n=6, temperature=1.0, seed=3)
    ends = [each["meta_info"]["finish_reason"] for each in found]
    assert all(valid(each["text"]) for each, end in zip(found, ends) if end["type"] == "stop")
    assert sum(end == {"type": "stop", "matched": "grammar"} for end in ends) >= 3, ends


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "(wc|ls) -[a-z]{1,3}"}, "(wc|ls) -[a-z]{1,3}"),
        ({"ebnf": 'root ::= "a" [0-9] [0-9]? "!"'}, "a[0-9]{1,2}!"),
        ({"ebnf": 'start: "x" NUMBER\nNUMBER: /[1-9]{2}/'}, "x[1-9]{2}"),
        ({"choice": ["one of\nthem", "another"]}, "one of\nthem|another"),
        ({"guided_choice": ["so"]}, "so"),
    ],
)
def test_text_has_its_form(server: ServerUnderTest, form: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, generate(server, **form)["text"])


def test_stream_is_the_whole_in_pieces(server: ServerUnderTest) -> None:
    whole = generate(server, json_schema=SCHEMA)
    body = {"text": "A town: ", "sampling_params": {**SAMPLING, "json_schema": SCHEMA}, "stream": True}
    with server.client.stream("POST", "/generate", json=body) as answer:
        events = [line for line in answer.iter_lines() if line.startswith("data: {")]
    assert valid(whole["text"])
    assert json.loads(events[-1][6:])["text"] == whole["text"]
    assert len(events) > 1


ITEM: Any = {"type": "item_trie", "item_trie": "catalogue"}


@pytest.mark.parametrize("how", [{"n": 4, "temperature": 1.0, "seed": 1}, {"n": 4, "beam_width": 6}])
def test_items_stand_in_text(server: ServerUnderTest, how: dict[str, Any]) -> None:
    """Words, an item of the catalogue, words, another one, and a number."""
    tag = {"type": "tag", "begin": "<|sid_begin|>", "content": ITEM, "end": "<|sid_end|>"}
    words = {"type": "regex", "pattern": "[a-z]{1,4}: "}
    elements = [words, tag, words, tag, {"type": "regex", "pattern": " [0-9]"}]
    form = {"structural_tag": {"format": {"type": "sequence", "elements": elements}}}
    found = generate(server, **form, **how, skip_special_tokens=False)
    assert len(found) == 4
    for each in found:
        assert each["meta_info"]["finish_reason"]["type"] == "stop"
        item = r"[a-z]{1,4}: <\|sid_begin\|>(.+)<\|sid_end\|>"
        match = re.fullmatch(f"{item}{item} [0-9]", each["text"])
        assert match is not None and {match[1], match[2]} <= set(ITEMS), each["text"]


def test_item_of_a_trie_that_is_not_loaded_is_refused(server: ServerUnderTest) -> None:
    form = {"format": {"type": "item_trie", "item_trie": "other"}}
    answer = server.generate(text="A", sampling_params={"structural_tag": form})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "item_trie_not_found")


def test_all_beams_fulfil_their_schema(server: ServerUnderTest) -> None:
    found = generate(server, json_schema=SMALL, beam_width=8, n=8)
    assert len(found) == 8 and all(valid(each["text"], SMALL) for each in found)


def test_output_that_is_cut_off_says_so(server: ServerUnderTest) -> None:
    found = generate(server, json_schema=SCHEMA, max_new_tokens=4)
    assert found["meta_info"]["finish_reason"]["type"] == "length"


def test_form_that_is_too_long_is_refused_at_once(server: ServerUnderTest) -> None:
    """As far as all outputs begin alike: when the grammar is compiled, and when it is known."""
    form = {"choice": ["a text of which every output has more than three tokens"]}
    for _ in range(2):
        answer = server.generate(text="A", sampling_params={**form, "max_new_tokens": 3})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "max_new_tokens", answer.text
        assert re.search("max_new_tokens is 3, but the shortest output of .*choice has [0-9]+ tokens", error["message"])
    assert generate(server, **form)["text"] == form["choice"][0]


def test_logprobs_are_those_of_the_model(server: ServerUnderTest) -> None:
    body = {"text": "A town: ", "sampling_params": {**SAMPLING, "regex": "[0-9]{3}"}, "return_logprob": True}
    meta = server.generate(**body).json()["meta_info"]
    assert all(logprob < 0 for logprob, *_ in meta["output_token_logprobs"]), "raw ones: no token was certain"


def test_continuation_begins_its_own_form(server: ServerUnderTest) -> None:
    first = server.generate(text="A town: ", sampling_params={**SAMPLING, "json_schema": SCHEMA}, rid="town",
                            retain_ttl=60).json()  # fmt: skip
    assert valid(first["text"])
    second = server.generate(
        continuation_of="town", text=" or ", sampling_params={**SAMPLING, "choice": ["yes", "no"]}
    ).json()
    assert second["text"] in ("yes", "no") and second["meta_info"]["continuation"]["path"] == "handoff"


class Week(BaseModel):
    model_config = ConfigDict(extra="forbid")
    days: set[Literal["Monday", "Tuesday", "Wednesday"]] = Field(min_length=2)
    hours: set[Annotated[int, Field(ge=8, le=11)]] = Field(min_length=3)


@pytest.mark.parametrize("seed", range(3))
def test_sets_hold_nothing_twice(server: ServerUnderTest, client: openai.OpenAI, seed: int) -> None:
    sampling = {"temperature": 1.5, "sampling_seed": seed, "n": 4, "json_schema": Week.model_json_schema()}
    for answer in generate(server, **sampling):
        assert answer["meta_info"]["finish_reason"]["type"] == "stop" and valid(answer["text"], sampling["json_schema"])
    found = client.chat.completions.parse(
        model="toy", messages=ASKED, temperature=1.5, seed=seed, max_tokens=200, response_format=Week
    )
    week = found.choices[0].message.parsed
    assert week is not None and len(week.days) >= 2


def test_beams_hold_nothing_twice(server: ServerUnderTest) -> None:
    schema = Week.model_json_schema()
    found = generate(server, beam_width=6, n=6, json_schema=schema)
    assert len(found) == 6 and all(valid(answer["text"], schema) for answer in found)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json_schema": {"not": {"uniqueItems": True}}}, "uniqueItems"),
        ({"json_schema": {"not": {"pattern": "a"}}}, "not at #/not"),
        ({"json_schema": {"$ref": "http://elsewhere.org/schema"}}, "elsewhere.org"),
        ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no output fulfils it"),
        ({"json_schema": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable"),
        ({"json_schema": {"type": "string", "x-guidance": {"lenient": True}, "not": {"pattern": "a"}}}, "not"),
        ({"json_schema": "{"}, "not valid JSON"),
        ({"json_schema": 5}, "takes a JSON Schema"),
        ({"regex": "("}, "regex"),
        ({"regex": "a(?=b)"}, "look"),
        ({"ebnf": "root ::= missing"}, "missing"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", 3]}, "a list of texts"),
        ({"regex": "a", "choice": ["b"]}, "both say what the output looks like"),
        ({"regex": "a", "item_trie": "x"}, "item_trie"),
    ],
    ids=str,
)
def test_form_that_cannot_be_kept_is_refused(server: ServerUnderTest, form: dict[str, Any], words: str) -> None:
    body = json.dumps({"text": "x", "sampling_params": {**SAMPLING, **form}})
    answer = server.client.post("/generate", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"] and "<state>" not in error["message"]
    assert generate(server, max_new_tokens=2)["text"]


def test_flood_of_grammars_leaves_others_their_tokens(server: ServerUnderTest) -> None:
    body = {"text": "A town: ", "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}, "stream": True}
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        flood = [pool.submit(generate, server, regex=f"[a-z]{{{number % 9 + 1}}}{number}") for number in range(120)]
        with server.client.stream("POST", "/generate", json=body) as answer:
            events = [line for line in answer.iter_lines() if line.startswith("data: {")]
        assert json.loads(events[-1][6:])["meta_info"]["completion_tokens"] == 60
        for number, each in enumerate(flood):
            assert re.fullmatch(f"[a-z]{{{number % 9 + 1}}}{number}", each.result()["text"])


def test_grammar_with_many_states_ends_with_a_reason_or_an_output(server: ServerUnderTest) -> None:
    hard = [
        {"regex": "(a?){300}a{300}"},
        {"regex": "((a{1,50}){1,50}){1,50}b"},
        {"json_schema": {"enum": [f"value {number}" for number in range(5000)]}},
        {"json_schema": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}},
        {"ebnf": 'start: start "a" | "b" start | "c"'},
    ]
    for form in hard:
        answer = server.generate(text="x", sampling_params={"max_new_tokens": 12, "temperature": 1.0, **form})
        assert answer.status_code in (200, 400), answer.text
    assert generate(server, choice=["still here"])["text"] == "still here"


# -- chats -------------------------------------------------------------------------------------------------------------


def test_openai_parse_gives_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="toy",
        messages=ASKED,
        response_format=Town,
        temperature=0,
        max_tokens=300,
    )
    town = answer.choices[0].message.parsed
    assert isinstance(town, Town) and answer.choices[0].finish_reason == "stop"


def test_openai_responses_parse_gives_an_object(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="toy", input="How many lines are in notes.txt?", text_format=Town, temperature=0, max_output_tokens=300
    )
    assert isinstance(answer.output_parsed, Town)
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "json_schema"


def test_json_object_is_one(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="toy",
        messages=ASKED,
        response_format={"type": "json_object"},
        temperature=1.0,
        seed=5,
        max_tokens=400,
    )
    (choice,) = answer.choices
    assert choice.message.content is not None and choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_anthropic_output_format(server: ServerUnderTest) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        answer = client.messages.create(
            model="toy",
            messages=ASKED,
            max_tokens=300,
            extra_body={"temperature": 0, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        )
    (block,) = answer.content
    assert block.type == "text" and valid(block.text)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"count", "note"}), ({"type": "function", "function": {"name": "note"}}, {"note"})],
    ids=["required", "named"],
)
def test_required_calls_fulfil_their_schema(client: openai.OpenAI, choice: Any, names: set[str], stream: bool) -> None:
    asked: Any = {"model": "toy", "messages": ASKED, "tools": TOOLS, "tool_choice": choice, "max_tokens": 300,
                  "temperature": 1.0, "seed": 1}  # fmt: skip
    if not stream:
        (answer,) = client.chat.completions.create(**asked).choices
        assert answer.message.tool_calls and answer.finish_reason in ("tool_calls", "length")
        calls = [(each.function.name, each.function.arguments) for each in answer.message.tool_calls]
        is_cut = answer.finish_reason == "length"
    else:
        parts: dict[int, list[str]] = {}
        end = None
        for chunk in client.chat.completions.create(**asked, stream=True):
            for each in chunk.choices[0].delta.tool_calls or []:
                function: Any = each.function
                parts.setdefault(each.index, ["", ""])
                parts[each.index][0] += function.name or ""
                parts[each.index][1] += function.arguments or ""
            end = chunk.choices[0].finish_reason or end
        calls, is_cut = [(name, arguments) for name, arguments in parts.values()], end == "length"
    schemas = {tool["name"]: tool["parameters"] for tool in (COUNT, NOTE)}
    assert calls and {name for name, _ in calls} <= names
    for name, arguments in calls[: len(calls) - is_cut]:
        assert valid(arguments, schemas[name])


def test_strict_call_or_an_answer_of_the_form(client: openai.OpenAI) -> None:
    """The model chooses; whatever it is fulfils its schema."""
    kinds = set()
    for seed in range(12):
        (answer,) = client.chat.completions.create(
            model="toy", messages=ASKED, tools=TOOLS, temperature=1.5, seed=seed, max_tokens=300,
            response_format={"type": "json_schema", "json_schema": {"name": "town", "schema": SCHEMA, "strict": True}},
        ).choices  # fmt: skip
        if answer.finish_reason == "length":
            continue
        kinds.add(answer.finish_reason)
        if answer.message.tool_calls:
            tool_calls: Any = answer.message.tool_calls
            for call in tool_calls:
                schema = (COUNT if call.function.name == "count" else NOTE)["parameters"]
                assert valid(call.function.arguments, schema)
        else:
            assert answer.message.content is not None and valid(answer.message.content)
    assert kinds


def test_strict_schema_that_cannot_be_kept_is_refused(client: openai.OpenAI) -> None:
    odd = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}, "required": ["x"]}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": odd, "strict": True}}]
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(model="toy", messages=ASKED, tools=tools, max_tokens=9)
    tools[0]["function"]["strict"] = False
    client.chat.completions.create(model="toy", messages=ASKED, tools=tools, tool_choice="required", max_tokens=9)
