"""Two parts are written side by side, and then put into one text that is summed up."""

import baton.entrypoints.lang as sgl


@sgl.function
def two_tips(s):
    s += "<|im_start|>user\nHow many lines are in poem.txt?<|im_end|>\n<|im_start|>assistant\n"
    forks = s.fork(2)
    for i, fork in enumerate(forks):
        fork += f"{i + 1}. "
        fork += sgl.gen("tip", max_tokens=12, temperature=0)
    s += "1. " + forks[0]["tip"] + "\n"
    s += "2. " + forks[1]["tip"] + "\n"
    s += "There" + sgl.gen("summary", max_tokens=12, temperature=0)


def main():
    state = two_tips.run()
    return {"text": state.text(), "summary": state["summary"]}
