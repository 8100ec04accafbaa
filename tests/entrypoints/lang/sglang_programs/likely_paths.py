"""The likeliest first tokens each become a path, which is continued greedily and judged by how sure its tokens were."""

from math import exp

import baton.entrypoints.lang as sgl


@sgl.function
def paths(s, question, width):
    s += "<|im_start|>user\n" + question + "<|im_end|>\n<|im_start|>assistant\n"
    first = s.fork(1)[0]
    forks = s.fork(width)
    first += sgl.gen(
        "first", max_tokens=1, temperature=0, return_logprob=True, top_logprobs_num=width, return_text_in_logprobs=True
    )
    ways = first.get_meta_info("first")["output_top_logprobs"][0]
    found = []
    for fork, (logprob, _, text) in zip(forks, ways):
        fork += text
        fork += sgl.gen("rest", temperature=0, max_tokens=8, return_logprob=True, top_logprobs_num=2)
        pairs = fork.get_meta_info("rest")["output_top_logprobs"]
        gap = sum(exp(best[0]) - exp(second[0]) for best, second in pairs) / len(pairs)
        found.append((text, exp(logprob), gap, fork["rest"]))
    return found


def main():
    return {"paths": paths.run("How many lines are in poem.txt?", width=3).ret_value}
