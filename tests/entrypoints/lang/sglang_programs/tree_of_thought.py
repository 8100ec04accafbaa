"""Plans branch, every plan is carried out more than once, and the joins go back up the tree."""

import baton.entrypoints.lang as sgl


def propose(s, question, branches):
    s += sgl.user(question)
    forks = s.fork(branches)
    forks += lambda i: sgl.assistant("```bash\n" + ["wc", "cat"][i] + sgl.gen("plan", max_tokens=6, temperature=0))
    return forks


def carry_out(s, branches):
    s += sgl.user("Count the lines of notes.md.")
    forks = s.fork(branches)
    forks += sgl.assistant(sgl.gen("result", max_tokens=10, temperature=0))
    return forks


@sgl.function
def search(s, question, branches):
    with s.copy() as draft:
        draft += sgl.user(question) + sgl.assistant(sgl.gen("draft", max_tokens=6, temperature=0))
    levels = [propose(s, question, branches)]
    for plan in list(levels[0]):
        levels.append(carry_out(plan, branches))
    for forks in reversed(levels):
        forks.join()


def main():
    state = search.run_batch([{"question": "How many lines are in poem.txt?", "branches": 2}], progress_bar=True)[0]
    return {"draft": state["draft"], "plans": state["plan"], "results": state["result"], "text": state.text()}
