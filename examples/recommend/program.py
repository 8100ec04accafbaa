r"""The recommender, as a staged program: the model's whole input and output, top to bottom.

Stage 2 continues stage 1: it takes over the first stage's KV, by a lock handoff, and sends only
`</think>\n<|sid_begin|>`. No token of the prompt or of the thought is computed a second time.
"""

from __future__ import annotations

from baton.entrypoints.lang import ProgramState, assistant_begin, assistant_end, beam, function, gen, system, user

TRIE = "catalogue"
"""The name under which the server knows which items exist."""
WIDTH = 32
CODES_PER_ITEM = 3


@function
def recommend(s: ProgramState, instruction: str, question: str, trie: str | None = TRIE) -> None:
    """``s["thought"]``: what the model thought. ``s["items"]``: the codes of 32 items, likeliest first; how likely is
    in ``s.meta("items")``. trie: None searches all codes, also those that no item has."""
    s += system(instruction)
    s += user(question)
    s += assistant_begin()

    # Stage 1 ends at </think>. The tag is no part of the state: stage 2 brings its own.
    s += gen("thought", max_tokens=100, stop="</think>")

    # Stage 2 starts inside an item, so that all that is left to say is its three codes.
    s += "</think>\n<|sid_begin|>"
    s += beam("items", width=WIDTH, max_tokens=CODES_PER_ITEM, item_trie=trie)

    # The state goes on with the likeliest item.
    s += "<|sid_end|>" + assistant_end()
