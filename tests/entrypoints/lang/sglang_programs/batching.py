"""One program on many inputs at a time: by name, by position, with one argument bound, and one result after another."""

import baton.entrypoints.lang as sgl


@sgl.function
def count(s, file, how="How many lines are in"):
    s += sgl.system("You are a shell agent. Do not think aloud.")
    s += sgl.user(how + " " + file + "?")
    s += sgl.assistant(sgl.gen("command", max_tokens=24))


FILES = ["poem.txt", "notes.md", "letter.csv", "manual.md", "poem.md"]


def main():
    by_name = count.run_batch([{"file": file} for file in FILES], temperature=0, num_threads=2, progress_bar=True)
    by_position = count.run_batch([(file, "How many lines are in") for file in FILES], temperature=0, num_threads=1)
    bound = count.bind(how="How many lines are in")
    one_by_one = bound.run_batch([{"file": file} for file in FILES], temperature=0, generator_style=True)
    return {
        "by_name": [state["command"] for state in by_name],
        "by_position": [state["command"] for state in by_position],
        "one_by_one": [state["command"] for state in one_by_one],
        "nothing": count.run_batch([]),
    }
