"""Runs an engine as a server on pipes: a JSON request on each line of stdin, a JSON answer on each line of stdout.

    PYTHON benchmarks/peers/drivers/serve.py vllm_driver '{"model": "FOLDER", "dtype": "float32", "cores": [0, 1]}'

The module, a sibling of this file, has a class Engine, which is created from the settings. The first line written is
its ``about``, once it is loaded. A request is {"do": METHOD, ...}, where the other keys are the method's keywords; the
answer is {"done": RESULT} or {"error": TEXT}. Output of libraries goes to stderr. The process ends when stdin closes.

This runs under the python of another engine: this file and the drivers import only the standard library and packages of
that engine. Each engine's driver has

    generate(requests, stream) -> {"seconds", "steps_s", "requests": [{"name", "ids", "first_s", "total_s"}]}
    beam(requests, width, steps) -> {"seconds": [of each request], "sequences": [per request its lists of ids]}
    press() -> {"tokens"}    computed by other requests, so many that what is kept without a lease is gone; 0: did not

Where an engine returns no ids, "ids" is empty and "tokens" is their number. Engines without beam search lack beam and
press.

A request is {"ids", "tokens"} and, where it matters, "seed" (sampled, not greedy), "keep" (another request will
continue it), "parent" and "suffix" (the name of the parent, and the new ids at the end). Times are seconds since all
requests of the call were submitted; steps_s, where the call streams, are the times between steps in which all of them
decoded.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import IO, Any


def claim_stdout() -> IO[str]:
    """The pipe to the caller; stdout itself becomes stderr, since libraries write there."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def answer(engine: Any, question: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"done": getattr(engine, question.pop("do"))(**question)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    module, settings = sys.argv[1:]
    answers = claim_stdout()
    engine = importlib.import_module(module).Engine(**json.loads(settings))
    answers.write(json.dumps(engine.about) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(answer(engine, json.loads(line))) + "\n")
    answers.flush()
    os._exit(0)  # some engines wait for threads of theirs that never end


if __name__ == "__main__":
    main()
