"""Measures how well the model knows its languages: greedy answers to held-out conversations, as a table.

    python -m baton.examples.toy_model.evaluate

Every assistant turn is generated from the true conversation up to it. An agent's turn counts if it is exact, including
the token that ends it. A margin is the gap between the two highest logits where a token was chosen: it shows how much
rounding a greedy answer tolerates.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer

from .conversation import THINK_END, TURN_END, Conversation
from .make_data import HELD_OUT_SEED, conversations
from .recommendation_language import ITEM_PATTERN, ITEMS, item_codes, likely_items, named_category
from .train import FOLDER

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM  # importing it takes seconds


@dataclass(slots=True)
class Answer:
    """One greedy answer. text: with special tokens. margins: float32 [generated tokens]."""

    text: str
    margins: torch.Tensor


def load(folder: Path) -> tuple[LlamaForCausalLM, Tokenizer]:
    """The model in float32 and its tokenizer."""
    from transformers import LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.inference_mode()
def answer(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompts: Sequence[str], batch: int = 32, max_new_tokens: int = 160
) -> list[Answer]:
    """Greedy answers to prompts, in their order; ``batch`` prompts of similar length run together."""
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda place: len(encoded[place]))
    answers: dict[int, Answer] = {}
    pad, end = model.config.pad_token_id, tokenizer.token_to_id(TURN_END)
    for start in range(0, len(order), batch):
        places = order[start : start + batch]
        length = max(len(encoded[place]) for place in places)
        ids = torch.tensor([[pad] * (length - len(encoded[place])) + encoded[place] for place in places])
        mask = torch.tensor([[0] * (length - len(encoded[p])) + [1] * len(encoded[p]) for p in places])
        out = model.generate(  # pyright: ignore[reportAttributeAccessIssue]  # its protocol lists hooks a model lacks
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(out.logits, dim=1).topk(2).values
        margins = best[..., 0] - best[..., 1]
        for row, place in enumerate(places):
            new = out.sequences[row, length:].tolist()
            count = new.index(end) + 1 if end in new else len(new)
            answers[place] = Answer(tokenizer.decode(new[:count], skip_special_tokens=False), margins[row, :count])
    return [answers[place] for place in range(len(prompts))]


@dataclass(slots=True)
class Scores:
    """Shares in [0, 1] over held-out conversations, and the margins of all generated tokens."""

    agent_turns: float
    agent_conversations: float
    think_category: float
    item_exists: float
    item_category: float
    item_likely: float
    """The item is one that a user may go to from where it is: one to three steps along the ring."""
    ends_by_itself: float
    margins: torch.Tensor


def evaluate(model: LlamaForCausalLM, tokenizer: Tokenizer, held_out: Sequence[Conversation]) -> Scores:
    """Greedy answers to every assistant turn of ``held_out``, judged."""
    turns = [(conversation, *pair) for conversation in held_out for pair in conversation.prompts()]
    answers = answer(model, tokenizer, [prompt for _, prompt, _ in turns])
    exact: dict[int, list[bool]] = {}
    recommendations: list[tuple[bool, bool, bool, bool]] = []
    for (conversation, prompt, expected), given in zip(turns, answers):
        if conversation.language == "agent":
            exact.setdefault(id(conversation), []).append(given.text == expected)
        else:
            recommendations.append(_judge_item(conversation, prompt, given.text))
    count = max(1, len(recommendations))
    think, exists, category, likely = (sum(column) / count for column in zip(*recommendations, strict=True))
    flat = [right for rights in exact.values() for right in rights]
    return Scores(
        agent_turns=sum(flat) / len(flat),
        agent_conversations=sum(map(all, exact.values())) / len(exact),
        think_category=think,
        item_exists=exists,
        item_category=category,
        item_likely=likely,
        ends_by_itself=sum(given.text.endswith(TURN_END) for given in answers) / len(answers),
        margins=torch.cat([given.margins for given in answers]),
    )


_ANSWER = re.compile(ITEM_PATTERN + re.escape(TURN_END))


def _judge_item(conversation: Conversation, prompt: str, text: str) -> tuple[bool, bool, bool, bool]:
    """(thought names the right category or is rightly absent, item exists, is of the category, is likely)."""
    wanted = conversation.facts["category"]
    thought, _, rest = text.rpartition(THINK_END)
    asked = "Think first." in prompt
    think = named_category(thought) == wanted if asked else not thought
    found = item_codes(rest) if _ANSWER.fullmatch(rest.strip()) else []
    item = ITEMS.get(found[0]) if found else None
    if item is None or item.category != wanted:
        return think, item is not None, False, False
    history = [ITEMS[codes] for codes in item_codes(prompt)]
    last = next(seen for seen in reversed(history) if seen.category == wanted)
    return think, True, True, item in likely_items(last)


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge the toy model on held-out conversations.")
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--count", type=int, default=400, help="held-out conversations, half of each language")
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    scores = evaluate(*load(args.model), list(conversations(args.seed, args.count)))
    low, median = torch.quantile(scores.margins, torch.tensor([0.01, 0.5])).tolist()
    for name, value in (
        ("agent: assistant turns exact", f"{scores.agent_turns:.1%}"),
        ("agent: whole conversations exact", f"{scores.agent_conversations:.1%}"),
        ("recommendation: thought names the right category", f"{scores.think_category:.1%}"),
        ("recommendation: item exists in the catalogue", f"{scores.item_exists:.1%}"),
        ("recommendation: item is of the right category", f"{scores.item_category:.1%}"),
        ("recommendation: item is one of the three likely ones", f"{scores.item_likely:.1%}"),
        ("all: answer ends by itself", f"{scores.ends_by_itself:.1%}"),
        (f"margin, median of {len(scores.margins)} tokens", f"{median:.2f}"),
        ("margin, 1st percentile", f"{low:.3f}"),
        ("margin, smallest", f"{scores.margins.min().item():.4f}"),
    ):
        print(f"{name:55} {value:>9}")


if __name__ == "__main__":
    main()
