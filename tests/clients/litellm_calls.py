"""Runs in litellm's environment: makes calls to a server, prints how each ended, a JSON object a line.

python litellm_calls.py URL KEY
"""

import json
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any

litellm: Any = import_module("litellm")  # not a package of the environment that type checkers see

litellm.suppress_debug_info = True
litellm.telemetry = False
URL, KEY = sys.argv[1:]
TALK = [{"role": "user", "content": "How many lines are in manual.md?"}]
LONG = [{"role": "user", "content": "x y " * 4000}]
PROVIDERS = {
    "openai": {"model": "openai/toy", "api_base": f"{URL}/v1"},
    "hosted_vllm": {"model": "hosted_vllm/toy", "api_base": f"{URL}/v1"},
    "anthropic": {"model": "anthropic/toy", "api_base": URL},
}


def tell(name, call):
    try:
        ended = {"text": call()}
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        ended = {
            "error": kinds[0],
            "kinds": kinds,
            "status": getattr(error, "status_code", None),
            "message": str(error),
        }
    print(json.dumps({"name": name} | ended), flush=True)


def complete(provider, **fields):
    options = {"messages": TALK, "max_tokens": 8, "temperature": 0, "api_key": KEY, "num_retries": 0}
    answer = litellm.completion(**(PROVIDERS[provider] | options | fields))
    if fields.get("stream"):
        return "".join(piece.choices[0].delta.content or "" for piece in answer)
    return answer.choices[0].message.content


for provider in PROVIDERS:
    other = PROVIDERS[provider]["model"].replace("toy", "nothing")
    for stream in (False, True):
        calls = {
            "answers": {},
            "overflow": {"messages": LONG},
            "overflow by max_tokens": {"max_tokens": 5000},
            "bad number": {"top_p": 7.5},
            "wrong key": {"api_key": "wrong"},
            "unknown model": {"model": other},
            "no time": {"timeout": 0.001},
            "dropped": {"logit_bias": {"5": 1}, "response_format": {"type": "text"}, "drop_params": True},
        }
        for name, fields in calls.items():
            call = partial(complete, provider, stream=stream, **fields)
            tell(f"{provider} {name}{' streamed' if stream else ''}", call)


def ask(path, body):
    """body: None for a GET."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(URL + path, data, headers)) as answer:
        return json.load(answer)


with ThreadPoolExecutor(1) as thread:  # the server's queue holds one request
    ask("/pause_generation", {"mode": "in_place"})
    waiting = thread.submit(ask, "/generate", {"text": "How many", "sampling_params": {"max_new_tokens": 2}})
    while ask("/get_load", None)[0]["num_waiting_reqs"] < 1:
        time.sleep(0.01)
    for provider in PROVIDERS:
        tell(f"{provider} queue is full", partial(complete, provider))
        tell(f"{provider} queue is full streamed", partial(complete, provider, stream=True))
    ask("/continue_generation", {})
    waiting.result()

TEXT = {"model": "text-completion-openai/toy", "api_base": f"{URL}/v1", "api_key": KEY, "max_tokens": 8}
tell("text answers", lambda: litellm.text_completion(prompt="How many", **TEXT).choices[0].text)
tell("text overflow", lambda: litellm.text_completion(prompt="x y " * 4000, **TEXT).choices[0].text)
tell(
    "responses answers",
    lambda: litellm.responses(input="hi", max_output_tokens=8, **PROVIDERS["openai"], api_key=KEY).output[0].type,
)
tell(
    "responses overflow",
    lambda: litellm.responses(input="x y " * 4000, **PROVIDERS["openai"], api_key=KEY).output[0].type,
)
