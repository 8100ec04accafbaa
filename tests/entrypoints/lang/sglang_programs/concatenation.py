"""Parts are written side by side, and all of them become the text that goes on."""

import baton.entrypoints.lang as sgl

FILES = ["poem.txt", "notes.md", "letter.csv"]


@sgl.function
def parts(s):
    s += sgl.system("You are a shell agent. Do not think aloud.")
    forks = s.fork(len(FILES))
    forks += lambda i: sgl.user("Count the lines of " + FILES[i] + ".")
    forks += sgl.assistant(sgl.gen("command", max_tokens=16, temperature=0))
    forks.join("concate_and_append")
    s += sgl.user("How long is manual.md?")
    s += sgl.assistant(sgl.gen("last", max_tokens=16, temperature=0))


def main():
    state = parts.run()
    return {"text": state.text(), "last": state["last"], "variables": "command" in state}
