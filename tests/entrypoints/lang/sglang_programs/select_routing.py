"""A question is routed by what the model finds likeliest; three ways to say what that is."""

import baton.entrypoints.lang as sgl

ROUTES = ["There is no file poem.txt.", "```bash\nwc -l poem.txt\n```", "I"]


@sgl.function
def route(s, question, method):
    s += sgl.user(question)
    s += sgl.assistant_begin()
    s += sgl.select("route", choices=ROUTES, choices_method=method)
    s += sgl.assistant_end()


def main():
    results = {}
    for name in ("token_length_normalized", "greedy_token_selection"):
        state = route.run("How many lines are in poem.txt?", getattr(sgl, name))
        logprobs = [[row[0] for row in rows] for rows in state.get_meta_info("route")["input_token_logprobs"]]
        results[name] = [state["route"], state.text(), logprobs]
    return results
