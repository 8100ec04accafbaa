"""Samples side by side, each with two steps of its own; the program has a parameter that is an option's name, too."""

import baton.entrypoints.lang as sgl


@sgl.function
def sample(s, question, n):
    s += "<|im_start|>user\n" + question + "<|im_end|>\n<|im_start|>assistant\n"
    forks = s.fork(n)
    forks += "```bash\n" + sgl.gen("command", max_tokens=12, stop="\n") + "\n```"
    forks += " " + sgl.gen("sure", choices=["yes", "no"])
    forks.join()


def main():
    state = sample.run_batch([{"question": "How many lines are in poem.txt?", "n": 3}], temperature=0)[0]
    return {"commands": state["command"], "sure": state["sure"], "text": state.text()}
