"""The model chooses a tool, and the program goes on with what it chose."""

import baton.entrypoints.lang as sgl


@sgl.function
def use_a_tool(s, question):
    s += "<|im_start|>user\n" + question + "<|im_end|>\n<|im_start|>assistant\n```bash\n"
    s += sgl.gen("tool", choices=["wc", "grep", "cat"])
    if s["tool"] == "wc":
        s += " -l" + sgl.gen("file", max_tokens=8, temperature=0, stop="\n")
    elif s["tool"] == "grep":
        s += sgl.gen("pattern", max_tokens=12, temperature=0, stop="\n")
    else:
        s += sgl.gen("path", max_tokens=12, temperature=0, stop="\n")


def main():
    counted = use_a_tool.run(question="How many lines are in poem.txt?")
    found = use_a_tool.run("Can you grep amber in manual.md?")
    return {
        "counted": [counted["tool"], counted.text(), counted.get_meta_info("tool")["normalized_prompt_logprobs"]],
        "found": [found["tool"], found.text(), found.get_meta_info("tool")["normalized_prompt_logprobs"]],
        "variables": ["file" in counted, "pattern" in counted, "pattern" in found],
    }
