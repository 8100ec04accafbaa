"""A conversation of two turns; every turn is generated."""

import baton.entrypoints.lang as sgl


@sgl.function
def two_questions(s, question_1, question_2):
    s += sgl.system("You are a shell agent. Do not think aloud.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=32))
    s += sgl.user(question_2)
    s += sgl.assistant(sgl.gen("answer_2", max_tokens=32))


def main():
    state = two_questions.run(
        question_1="How many lines are in poem.txt?", question_2="Count the lines of notes.md.", temperature=0
    )
    for message in state.messages():
        print(message["role"], ":", message["content"])
    return {"text": state.text(), "answers": [state["answer_1"], state["answer_2"]], "messages": state.messages()}
