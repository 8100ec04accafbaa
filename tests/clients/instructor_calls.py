"""Runs in instructor's environment: has a server fill in models in each mode of instructor, and prints a JSON object a
line: what came back, and how it ended.

python instructor_calls.py URL
"""

import json
import sys
from importlib import import_module
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# not packages of the environment that type checkers see, or other versions of them
anthropic: Any = import_module("anthropic")
instructor: Any = import_module("instructor")
openai: Any = import_module("openai")
Mode = instructor.Mode

URL = sys.argv[1]


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    by_the_sea: bool
    height: int = Field(ge=0, le=999)


class Town(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(pattern="^[A-Z][a-z]{1,7}$")
    kind: Literal["village", "city"]
    place: Place
    mayors: list[Literal["Ada", "Bo"]] = Field(max_length=2)


class Note(BaseModel):
    # For modes that ask for any object: the model, which cannot read, may leave the text out.
    text: str = ""


ASKED = {
    "model": "toy",
    "messages": [{"role": "user", "content": "How many lines are in notes.txt?"}],
    "max_tokens": 800,
    "temperature": 0,
    "max_retries": 0,
}


def tell(name, call):
    try:
        found = call()
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:2000]}
    print(json.dumps({"name": name} | found), flush=True)


def whole(client, model):
    found, answer = client.create_with_completion(response_model=model, **ASKED)
    if hasattr(answer, "choices"):
        ended = answer.choices[0].finish_reason
    else:
        ended = getattr(answer, "stop_reason", None) or answer.status
    return {"is_valid": isinstance(found, model), "found": found.model_dump(), "ended": ended}


def streamed(client, model):
    objects = list(client.create_partial(response_model=model, **ASKED))
    found = objects[-1].model_dump()
    model.model_validate(found)
    return {"is_valid": True, "found": found, "num_objects": len(objects)}


with (
    openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as of_openai,
    anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0) as of_anthropic,
):
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS):
        client = instructor.from_openai(of_openai, mode=mode)
        model = Note if mode is Mode.JSON else Town
        tell(mode.name, lambda client=client, model=model: whole(client, model))
        if mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
            tell(f"{mode.name} streamed", lambda client=client: streamed(client, Town))
    client = instructor.from_anthropic(of_anthropic, mode=Mode.ANTHROPIC_TOOLS)
    tell("ANTHROPIC_TOOLS", lambda: whole(client, Town))
    tell("ANTHROPIC_TOOLS streamed", lambda: streamed(client, Town))
