"""Every way to write a message, a part of the text as a variable, and variables that the program sets itself."""

import baton.entrypoints.lang as sgl


@sgl.function
def talk(s, file):
    s += sgl.system_begin() + "You are a shell agent. Do not think aloud." + sgl.system_end()
    with s.user():
        s += "How many lines are in " + file + "?"
    s += sgl.assistant_begin()
    with s.var_scope("turn"):
        s += "```bash\n"
        s += sgl.gen("command", max_tokens=12, temperature=0)
    s += sgl.assistant_end()
    s.user("Count the lines of notes.md.")
    s.assistant(sgl.gen("again", max_tokens=12, temperature=0))
    s.set_var("file", file)
    s["length"] = len(s["turn"])
    return s["turn"].upper()


def main():
    state = talk.run(file="poem.txt")
    return {
        "messages": state.messages(),
        "turn": state["turn"],
        "command": state["command"],
        "set": [state.get_var("file"), state["length"]],
        "returned": state.ret_value,
        "shown": str(state),
    }
