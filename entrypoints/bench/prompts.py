"""Random texts of about a wanted number of tokens, for a server whose tokenizer is not known here.

Two probes measure how many tokens a word takes, and how many a prompt has besides its words (those of a template, for
example). So prompts have about the requested length, not exactly; reports have the server's token counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_WORDS = """
about above after again almost along always answer around because become before behind better between bring
build carry change city clear close cold color come could country cover cross dark deep different door down
draw early earth enough even every example family far farm fast father feel field find fire first fish follow
food form found friend game garden give glass gold good grass great green ground group grow half hand happy
hard head hear heart heavy help here high hold home horse hour house hundred idea island keep kind king know
land language large last late laugh lead learn leave left letter life light line list listen little live long
look love machine make many map mark market mean measure might mile milk mind minute money month moon morning
mother mountain move music name nature near never night north note nothing notice number ocean often old open
order page paper part pass pattern people picture piece place plain plan plant play point power press quick
quiet rain read ready real red remember rest right river road rock room round rule run sail salt same school
science sea season second seed sentence serve seven shape ship short show side silver simple sing sister sleep
slow small snow song soon sound south space special spell spring stand star start state stay step still stone
story street strong study summer sun sure table tail talk teach tell thing think thousand three through time
town travel tree true turn under until usual valley voice walk wall warm watch water wave weather week west
wheel white whole wind window winter wish wonder wood word work world write year yellow young
"""
WORDS = tuple(_WORDS.split())

Probe = tuple[int, int]
"""Words of a prompt, and its tokens."""


@dataclass(frozen=True)
class WordCount:
    """A prompt of n words has ``overhead + per_word * n`` tokens."""

    per_word: float
    overhead: float

    @classmethod
    def of(cls, one: Probe, other: Probe) -> WordCount:
        """Raises ValueError if the longer text does not have more tokens."""
        (few, low), (many, high) = sorted((one, other))
        if high <= low:
            raise ValueError(f"the server counts {low} tokens for {few} words, and {high} for {many}")
        per_word = (high - low) / (many - few)
        return cls(per_word, max(0.0, low - per_word * few))

    def words_for(self, tokens: int, *, first: bool = True) -> int:
        """Words of a text of so many tokens, at least 1. first: the overhead is part of them."""
        return max(1, round((tokens - self.overhead * first) / self.per_word))


def probe_sizes(tokens: int) -> tuple[int, int]:
    """Words of the two probes before prompts of so many tokens: no longer than those, but for the shortest."""
    many = min(256, max(16, tokens))
    return many // 4, many


def random_text(rng: np.random.Generator, words: int) -> str:
    return " ".join(WORDS[index] for index in rng.integers(len(WORDS), size=words))


def conversations(
    seed: tuple[int, ...], count: int, turns: int, input_tokens: int, words: WordCount
) -> list[list[str]]:
    """The user's texts of each conversation; equal seeds give equal texts. A later turn begins with a line of its own,
    so that texts that are joined with an answer between them do not run together."""
    rng = np.random.default_rng(seed)
    first, later = words.words_for(input_tokens), words.words_for(input_tokens, first=False)
    return [
        [random_text(rng, first), *("\n" + random_text(rng, later) for _ in range(turns - 1))] for _ in range(count)
    ]
