"""Client libraries of others, unchanged: each gets an object of its type from the toy model.

Without its form an answer of that model is no JSON, and its calls have no arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import anthropic
import jsonschema_rs
import openai
import pydantic_ai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic_ai import NativeOutput, PromptedOutput, RunContext, Tool, ToolOutput
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.models import openai as pydantic_openai
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
QUESTION = "How many lines are in notes.txt?"
ASKED: Any = [{"role": "user", "content": QUESTION}]
MAX_TOKENS = 800
"""More than any object below has, with spaces and line breaks wherever JSON may have them."""


class Kind(enum.Enum):
    VILLAGE = "village"
    CITY = "city"


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    by_the_sea: bool
    height: int = Field(ge=0, le=999)


class Town(BaseModel):
    """A town."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(pattern="^[A-Z][a-z]{1,7}$")
    kind: Kind
    place: Place
    mayors: list[Literal["Ada", "Bo"]] = Field(max_length=2)


class Farm(BaseModel):
    """A farm."""

    model_config = ConfigDict(extra="forbid")
    animal: Literal["cow", "hen"]
    count: int = Field(ge=1, le=99)


class Engine(BaseModel):
    model_config = ConfigDict(extra="forbid")
    fuel: Literal["coal", "wind"]


class Ship(BaseModel):
    """Listed values alone: Anthropic's client leaves limits and patterns out of schemas."""

    model_config = ConfigDict(extra="forbid")
    engine: Engine
    crew: Literal[1, 2, 3]


class Raft(BaseModel):
    model_config = ConfigDict(extra="forbid")
    is_afloat: bool


class Note(BaseModel):
    # For forms that are any object: the model, which cannot read, may leave the text out.
    text: str = ""


Farms = Annotated[list[Farm], Field(max_length=2)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--max-total-tokens", "16384", "--dtype", "float32", "--device", "cpu", "--linear-backend", "torch"]
    folder = tmp_path_factory.mktemp("server")
    with ServerUnderTest(TOY_MODEL, folder, *flags, "--served-model-name", "toy", behaviour=None) as running:
        yield running.wait_ready()


both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


# -- openai ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def openai_client(server: ServerUnderTest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def openai_chat(client: openai.OpenAI, stream: bool, **fields: Any) -> Any:
    """The one choice of the answer, parsed by the client."""
    asked: Any = {"model": "toy", "messages": ASKED, "temperature": 0, "max_tokens": MAX_TOKENS} | fields
    if not stream:
        (choice,) = client.chat.completions.parse(**asked).choices
    else:
        with client.chat.completions.stream(**asked) as events:
            kinds = [event.type for event in events]
            (choice,) = events.get_final_completion().choices
        deltas = "tool_calls.function.arguments.delta" if "tools" in fields else "content.delta"
        assert kinds.count(deltas) > 3, kinds
    return choice


@both_ways
def test_openai_chat_is_parsed(openai_client: openai.OpenAI, stream: bool) -> None:
    choice = openai_chat(openai_client, stream, response_format=Town)
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Town)


@both_ways
def test_openai_strict_call_is_parsed(openai_client: openai.OpenAI, stream: bool) -> None:
    tools = [openai.pydantic_function_tool(model) for model in (Town, Farm)]
    found = openai_chat(openai_client, stream, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = found.message.tool_calls
    assert found.finish_reason == "tool_calls" and isinstance(call.function.parsed_arguments, Town | Farm)


def test_openai_call_or_form_is_parsed(openai_client: openai.OpenAI) -> None:
    found = openai_chat(
        openai_client,
        stream=False,
        tools=[openai.pydantic_function_tool(Farm)],
        parallel_tool_calls=False,
        response_format=Town,
    )
    if found.finish_reason == "tool_calls":
        (call,) = found.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Farm)
    else:
        assert found.finish_reason == "stop" and isinstance(found.message.parsed, Town)


@both_ways
def test_openai_response_is_parsed(openai_client: openai.OpenAI, stream: bool) -> None:
    asked: Any = {"model": "toy", "input": QUESTION, "temperature": 0, "max_output_tokens": MAX_TOKENS}
    if not stream:
        answer = openai_client.responses.parse(**asked, text_format=Town)
    else:
        with openai_client.responses.stream(**asked, text_format=Town) as events:
            kinds = [event.type for event in events]
            answer = events.get_final_response()
        assert kinds.count("response.output_text.delta") > 3, kinds
    assert answer.status == "completed" and isinstance(answer.output_parsed, Town)


def test_openai_response_has_a_parsed_call(openai_client: openai.OpenAI) -> None:
    answer: Any = openai_client.responses.parse(
        model="toy",
        input=QUESTION,
        tools=[openai.pydantic_function_tool(model) for model in (Town, Farm)],
        tool_choice={"type": "function", "name": "Town"},
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=MAX_TOKENS,
    )
    (call,) = answer.output
    assert answer.status == "completed" and isinstance(call.parsed_arguments, Town)


# -- anthropic ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def anthropic_client(server: ServerUnderTest) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@both_ways
def test_anthropic_message_is_parsed(anthropic_client: anthropic.Anthropic, stream: bool) -> None:
    asked: Any = {"model": "toy", "messages": ASKED, "max_tokens": MAX_TOKENS, "output_format": Ship}
    asked["extra_body"] = {"temperature": 0}
    if not stream:
        answer = anthropic_client.messages.parse(**asked)
    else:
        with anthropic_client.messages.stream(**asked) as events:
            assert sum(event.type == "text" for event in events) > 3
            answer = events.get_final_message()
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert isinstance(answer.parsed_output, Ship)


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_anthropic_message_fulfils_its_schema(anthropic_client: anthropic.Anthropic, field: str) -> None:
    """output_format: as earlier clients send it."""
    form = {"type": "json_schema", "schema": Town.model_json_schema()}
    body = {"temperature": 0, field: {"format": form} if field == "output_config" else form}
    answer = anthropic_client.messages.create(model="toy", messages=ASKED, max_tokens=MAX_TOKENS, extra_body=body)
    (block,) = answer.content
    assert answer.stop_reason == "end_turn" and block.type == "text"
    Town.model_validate_json(block.text)


@both_ways
def test_anthropic_strict_call_fulfils_its_schema(anthropic_client: anthropic.Anthropic, stream: bool) -> None:
    schemas = {"town": Town.model_json_schema(), "farm": Farm.model_json_schema()}
    asked: Any = {"model": "toy", "messages": ASKED, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
    asked["tools"] = [{"name": name, "input_schema": schema, "strict": True} for name, schema in schemas.items()]
    asked["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    if not stream:
        answer = anthropic_client.messages.create(**asked)
    else:
        with anthropic_client.messages.stream(**asked) as events:
            answer = events.get_final_message()
    (block,) = answer.content
    assert answer.stop_reason == "tool_use" and block.type == "tool_use"
    jsonschema_rs.validate(schemas[block.name], block.input)


def test_anthropic_tool_runner_runs_the_call(anthropic_client: anthropic.Anthropic) -> None:
    seen = []

    @anthropic.beta_tool(strict=True)
    def measure(file: Literal["notes.txt", "plan.md"], unit: Literal["lines", "words"]) -> str:
        """How long a file is.

        Args:
            file: The file.
            unit: What is counted.
        """
        seen.append((file, unit))
        return "12"

    runner = anthropic_client.beta.messages.tool_runner(
        model="toy",
        messages=ASKED,
        max_tokens=MAX_TOKENS,
        tools=[measure],
        tool_choice={"type": "tool", "name": "measure", "disable_parallel_tool_use": True},
        max_iterations=2,
        extra_body={"temperature": 0},
    )
    assert [answer.stop_reason for answer in runner] == ["tool_use"] * 2
    assert seen and all(file in ("notes.txt", "plan.md") and unit in ("lines", "words") for file, unit in seen)


# -- pydantic-ai -------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def pydantic_model(url: str, api: str) -> AsyncIterator[Any]:
    if api == "messages":
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            provider = AnthropicProvider(anthropic_client=client)
            yield AnthropicModel("toy", provider=provider, profile={"supports_json_schema_output": True})
    else:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            model = pydantic_openai.OpenAIChatModel if api == "chat" else pydantic_openai.OpenAIResponsesModel
            yield model("toy", provider=OpenAIProvider(openai_client=client))


def run_agent(url: str, api: str, output_type: Any, **options: Any) -> tuple[Any, list[Any]]:
    """The output, and all responses. options: of the agent. It does not ask again after output of another type."""

    async def run() -> tuple[Any, list[Any]]:
        async with pydantic_model(url, api) as model:
            agent = pydantic_ai.Agent(model, output_type=output_type, retries=0, **options)
            settings = pydantic_ai.ModelSettings(max_tokens=MAX_TOKENS, temperature=0.0, parallel_tool_calls=False)
            result = await agent.run(QUESTION, model_settings=settings)
        return result.output, [message for message in result.all_messages() if message.kind == "response"]

    return asyncio.run(run())


OUTPUTS: dict[str, tuple[Any, Any]] = {
    "tool": (ToolOutput(Town), Town),
    "strict tool": (ToolOutput(Ship, strict=True), Ship),
    "native": (NativeOutput(Town), Town),
    "native ship": (NativeOutput(Ship), Ship),
    "tool list": (ToolOutput(Farms), list),
    "native list": (NativeOutput(Farms), list),
    "tools": ([ToolOutput(Ship), ToolOutput(Raft)], Ship | Raft),
    "native union": (NativeOutput([Ship, Raft]), Ship | Raft),
    "enum": (Kind, Kind),
    "strict enum": (ToolOutput(Kind, strict=True), Kind),
    "prompted": (PromptedOutput(Note), Note),
}
"""Output type of an agent -> the classes of its outputs."""

AGENTS = {
    "chat": ("tool", "strict tool", "native", "tool list", "native list", "tools", "native union", "enum", "prompted"),
    "responses": ("tool", "native list", "native union", "prompted"),
    "messages": ("tool", "strict tool", "native ship", "tools", "native union", "strict enum"),
}
"""API -> outputs. Not prompted with messages: then words alone ask for JSON. Without strict, the agent's own object
around an enum or a list is open, and the model would fill it for ever."""


@pytest.mark.parametrize(("api", "name"), [(api, name) for api, names in AGENTS.items() for name in names])
def test_pydantic_ai_output_has_its_type(server: ServerUnderTest, api: str, name: str) -> None:
    output_type, classes = OUTPUTS[name]
    output, (response,) = run_agent(server.url, api, output_type)
    assert isinstance(output, classes) and (not isinstance(output, list) or len(output) <= 2)
    is_text = api == "responses" or name.startswith(("native", "prompted"))
    assert response.finish_reason == ("stop" if is_text else "tool_call")


@pytest.mark.parametrize("output", [ToolOutput(Ship), NativeOutput(Ship)], ids=["tool", "native"])
@pytest.mark.parametrize("api", AGENTS)
def test_pydantic_ai_agent_runs_a_tool_before_its_output(server: ServerUnderTest, api: str, output: Any) -> None:
    looks = []

    def look(file: Literal["notes.txt", "plan.md"]) -> str:
        """Looks into a file."""
        looks.append(file)
        return "12 lines"

    async def offer_once(context: RunContext[Any], tool: ToolDefinition) -> ToolDefinition | None:
        return None if looks else tool

    async def offer_after_look(context: RunContext[Any], tools: list[ToolDefinition]) -> list[ToolDefinition]:
        return tools if looks else []

    found, responses = run_agent(
        server.url,
        api,
        output,
        tools=[Tool(look, prepare=offer_once, strict=True)],
        capabilities=[PrepareOutputTools(offer_after_look)],
    )
    assert isinstance(found, Ship) and len(responses) == 1 + len(looks)
    if isinstance(output, ToolOutput):  # else the model may do without
        assert looks in (["notes.txt"], ["plan.md"])


# -- langchain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "strict", "api"),
    [
        ("function_calling", None, "chat"),
        ("function_calling", True, "chat"),
        ("json_schema", None, "chat"),
        ("json_schema", True, "chat"),
        ("json_mode", None, "chat"),
        ("function_calling", True, "responses"),
        ("json_schema", True, "responses"),
    ],
)
def test_langchain_output_has_its_type(server: ServerUnderTest, method: Any, strict: bool | None, api: str) -> None:
    model = ChatOpenAI(
        model="toy",
        base_url=f"{server.url}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        temperature=0,
        max_completion_tokens=MAX_TOKENS,
        use_responses_api=api == "responses",
    )
    schema = Note if method == "json_mode" else Town
    asked = model.with_structured_output(schema, method=method, strict=strict, include_raw=True)
    found: Any = asked.invoke(QUESTION)
    assert found["parsing_error"] is None and isinstance(found["parsed"], schema)
    ended = found["raw"].response_metadata
    if api == "responses":
        assert ended["status"] == "completed"
    else:
        assert ended["finish_reason"] == ("tool_calls" if method == "function_calling" else "stop")
