"""Text is read while it is generated: all of it, one variable, with asyncio, and with what is known of it so far."""

import asyncio

import baton.entrypoints.lang as sgl


@sgl.function
def two_answers(s, question_1, question_2):
    s += sgl.system("You are a shell agent. Do not think aloud.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=24))
    s += sgl.user(question_2)
    s += sgl.assistant(sgl.gen("answer_2", max_tokens=24))


def start():
    return two_answers.run(
        question_1="How many lines are in poem.txt?",
        question_2="Count the lines of notes.md.",
        temperature=0,
        stream=True,
    )


async def read():
    pieces = [out async for out in start().text_async_iter(var_name="answer_2")]
    known = [item async for item in start().text_async_iter(var_name="answer_2", return_meta_data=True)]
    return pieces, known


def main():
    everything = list(start().text_iter())
    second = list(start().text_iter(var_name="answer_2"))
    pieces, known = asyncio.run(read())
    return {
        "everything": "".join(everything),
        "second": "".join(second),
        "async": "".join(pieces),
        "known": "".join(piece for piece, _ in known),
        "tokens": known[-1][1]["completion_tokens"],
        "in_pieces": min(len(everything), len(second), len(pieces), len(known)) > 2,
    }
