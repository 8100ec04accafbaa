"""Runs in litellm's environment: mini-swe-agent with its own prompts and models, on an environment that runs nothing.
Prints a line of JSON for each run: {"turns": [[prompt, cached, output], …], "fill_times_s": […]}, the tokens of each
request as litellm was told them, and the server's fill time at each command.

python mini_swe_agent_runs.py URL [PAGES]     PAGES: of the pool, which is filled between a command and its result
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx

from tests.doubles.page_flood import PageFlood
from tests.doubles.pressed_tools import PressedTool
from tests.doubles.swe_commands import COMMANDS, output_of, task_of

# Not packages of the environment that type checkers see.
litellm: Any = import_module("litellm")
yaml: Any = import_module("yaml")
config: Any = import_module("minisweagent.config")
DefaultAgent: Any = import_module("minisweagent.agents.default").DefaultAgent
Submitted: Any = import_module("minisweagent.exceptions").Submitted
get_model_class: Any = import_module("minisweagent.models").get_model_class

litellm.suppress_debug_info = True
litellm.telemetry = False

URL = sys.argv[1]
RUNS = [
    ("tool", "litellm", "hosted_vllm/any", f"{URL}/v1", "mini.yaml"),
    ("tool", "litellm", "openai/any", f"{URL}/v1", "mini.yaml"),
    ("tool", "litellm", "anthropic/any", URL, "mini.yaml"),
    ("tool", "litellm_response", "openai/any", f"{URL}/v1", "mini.yaml"),
    ("text", "litellm_textbased", "openai/any", f"{URL}/v1", "mini_textbased.yaml"),
]
"""(how the model acts, its class, its name, the base of the API, the prompts)"""


class StubEnvironment:
    """The n-th command of a task has the n-th output."""

    def __init__(self, way: str, pressure: PressedTool | None) -> None:
        self.config = None
        self._way, self._pressure = way, pressure
        self._number = 0

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        assert action["command"] == COMMANDS[self._number], action
        self._number += 1
        if self._number == len(COMMANDS):
            raise Submitted({"role": "exit", "content": "", "extra": {"exit_status": "Submitted", "submission": ""}})
        if self._pressure is not None:
            self._pressure.wait()
        return {"output": output_of(self._way, self._number), "returncode": 0, "exception_info": ""}

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        return {"system": "Linux", "release": "6", "version": "1", "machine": "x86_64"}

    def serialize(self) -> dict[str, Any]:
        return {}


def usage_of(response: dict[str, Any]) -> list[int]:
    usage = response["usage"]
    if "input_tokens" in usage:
        return [usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]]
    return [usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]]


for number, (way, name, model_name, base, prompts) in enumerate(RUNS):
    settings = yaml.safe_load((Path(config.builtin_config_dir) / prompts).read_text())
    options = settings["model"] | {"model_name": model_name, "cost_tracking": "ignore_errors"}
    options["model_kwargs"] = options["model_kwargs"] | {"api_base": base, "api_key": "none"}
    if model_name.startswith("anthropic/"):
        options["model_kwargs"]["max_tokens"] = 4096  # litellm's own, 128,000, is more than the context
    model = get_model_class(model_name, name)(**options)
    pressure = PressedTool(URL, PageFlood(URL, f"{number}", int(sys.argv[2]))) if len(sys.argv) > 2 else None
    templates = {key: settings["agent"][key] for key in ("system_template", "instance_template")}
    # A task's last command never returns: what is kept of earlier tasks would leave no room to keep this one's.
    assert httpx.post(f"{URL}/flush_cache").status_code == 200
    agent = DefaultAgent(model, StubEnvironment(way, pressure), **templates)
    ended = agent.run(task_of(way, number))
    assert ended["exit_status"] == "Submitted", ended
    answers = [message.get("extra", {}).get("response") or message for message in agent.messages]
    turns = [usage_of(answer) for answer in answers if "usage" in answer]
    print(
        json.dumps({"turns": turns, "fill_times_s": pressure.fill_times_s if pressure is not None else []}), flush=True
    )
