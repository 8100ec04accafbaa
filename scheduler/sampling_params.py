"""The sampling parameters of a request: plain data that every process passes on unchanged.

Names follow SGLang's ``sampling_params``. Validation against a model is done elsewhere (vocabulary:
runtime/prompt.py, lengths: limits.py); this class only refuses what can never be right.
"""

from __future__ import annotations

from typing import Literal, NoReturn

import msgspec

MAX_TEMPERATURE = 1e30
"""Every logit is divided by the temperature in float32, where anything over 3.4e38 is infinite."""

GREEDY_TEMPERATURE = 1e-6
"""Below this a temperature counts as 0, as in SGLang."""

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
"""Logits are divided or multiplied by it in float32, where the smallest are 1.2e-38 and the largest 3.4e38."""

MAX_INT = 2**63 - 1
"""Integers cross process borders in 64 bits."""

MIN_SEED, MAX_SEED = -MAX_INT - 1, MAX_INT
"""Sample i of n adds i. Noise is made of the sum's 64 bits, so a negative seed is one like any other."""

MAX_BIAS = 100.0
"""Limit of one token's bias in either direction, as in OpenAI's API."""

MAX_SEQUENCES = 512
"""The largest n and beam_width."""

MAX_STOP_TOKEN_IDS = 1024
"""Each step looks the ids up, or bans them."""

MAX_STOPS, MAX_STOP_CHARS = 128, 16_384
"""Stop strings, and their characters together: each token of each sequence is searched for every one, in two processes.
"""

MAX_STOP_REGEX, MAX_STOP_REGEX_CHARS = 8, 512
"""Regular expressions that end an output, and their characters together, which take time to compile. What matching may
cost is bounded where they are compiled (runtime/text/stop_regex.py)."""

MAX_LOGIT_BIAS = 1024
"""Entries. They are gathered whenever the sequences that sample together change, a beam search's in each step."""

MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 128, 4096
"""Words, and their characters together. They are tokenised on arrival, and compared with the output in each step."""

MAX_ALLOWED_TOKEN_IDS = 16_384
"""Each step of the request uploads the ids."""

MAX_NAME_CHARS = 128
"""Longest name of an item trie."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A grammar that the output must fulfil. name: of the field that set it, for messages. source: in llguidance's own
    form, JSON or Lark."""

    name: str
    source: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters of one request. A bad value raises ValueError with the field, the value and the fix.

    max_new_tokens: tokens to generate at most; None means "up to the context length", 0 computes the prompt only.
    min_new_tokens: until that many are generated, eos, stop ids and stop strings cannot end the request.
    temperature: 0 is greedy, and so is anything below GREEDY_TEMPERATURE. top_k: -1 is off, and so is the vocabulary.
    top_p, min_p: probabilities in (0, 1] and [0, 1].
    stop: strings that end the output, not part of the text unless ``no_stop_trim``.
    stop_regex: regular expressions, in RE2's syntax, that end the output where they match; the match stays in the text.
    stop_token_ids: ids that end the output like eos does (``ignore_eos`` leaves them active).
    logit_bias: token id -> value in [-MAX_BIAS, MAX_BIAS] added to its logit.
    bad_words: texts to ban; the token sequence of each, with or without a leading space, never occurs in the output.
    seed: same seed, same prompt -> same tokens, whatever else is in the batch. None: drawn by the server.
    n: independent samples; sample ``i`` uses ``seed + i``. With a beam search: how many of its sequences are returned.
    beam_width: search for the likeliest sequences, with this many beams, instead of sampling; None samples.
    length_penalty: a finished sequence scores cumulative log-probability / (generated tokens ** length_penalty).
    early_stopping: True ends the search when beam_width sequences have finished, False when the best running one is not
    expected to beat the worst finished one, "never" when it cannot; all as transformers defines them.
    allowed_token_ids: the only ids that may be sampled, eos among them or not; empty for all.
    item_trie: name of a trie; its items are the only outputs. The end of an item ends the output, eos does not.
    grammar: what outputs look like. Where it allows nothing more, the output ends.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    seed: int | None = None
    n: int = 1
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    item_trie: str | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        # Plain tests: a request is checked in two processes, and most are fine.
        limit = self.max_new_tokens
        if limit is not None and limit < 0:
            self._refuse("max_new_tokens", "use 1 or more, or 0 to compute the prompt only")
        if self.min_new_tokens < 0:
            self._refuse("min_new_tokens", "use 0 or more")
        if limit is not None and self.min_new_tokens > limit:
            self._refuse("min_new_tokens", f"it exceeds max_new_tokens ({limit})")
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            self._refuse("temperature", f"use 0 (greedy) to {MAX_TEMPERATURE:g}")
        if not 0.0 < self.top_p <= 1.0:
            self._refuse("top_p", "use a value in (0, 1]")
        if self.top_k != -1 and not 1 <= self.top_k <= MAX_INT:
            self._refuse("top_k", "use -1 (off) or 1 and more, in 63 bits")
        if not 0.0 <= self.min_p <= 1.0:
            self._refuse("min_p", "use a value in [0, 1]")
        if not -2.0 <= self.frequency_penalty <= 2.0:
            self._refuse("frequency_penalty", "use a value in [-2, 2]")
        if not -2.0 <= self.presence_penalty <= 2.0:
            self._refuse("presence_penalty", "use a value in [-2, 2]")
        if not MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY:
            least, most = f"{MIN_REPETITION_PENALTY:g}", f"{MAX_REPETITION_PENALTY:g}"
            self._refuse("repetition_penalty", f"use a value in [{least}, {most}]; 1 is off")
        if not 1 <= self.n <= MAX_SEQUENCES:
            self._refuse("n", f"use 1 to {MAX_SEQUENCES}")
        self._check_stops()
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids has {len(self.stop_token_ids)} ids; use at most {MAX_STOP_TOKEN_IDS}")
        if self.logit_bias and len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries; use at most {MAX_LOGIT_BIAS}")
        if self.logit_bias and not all(-MAX_BIAS <= value <= MAX_BIAS for value in self.logit_bias.values()):
            self._refuse("logit_bias", "use values in [-100, 100]")
        if self.seed is not None and not MIN_SEED <= self.seed <= MAX_SEED:
            self._refuse("seed", "use a whole number of 64 bits, or leave it out")
        if self.item_trie is not None:
            if len(self.item_trie) > MAX_NAME_CHARS:
                raise ValueError(f"item_trie has {len(self.item_trie)} characters; names have at most {MAX_NAME_CHARS}")
            if self.item_trie == "":
                self._refuse("item_trie", "name a loaded trie, or leave it out")
            if self.min_new_tokens > 0:
                self._refuse("min_new_tokens", "an item of item_trie ends where it ends; leave it out")
        if self.allowed_token_ids:
            self._check_allowed_ids()
        if self.bad_words:
            self._check_bad_words()
        if self.grammar is not None:
            for name in ("item_trie", "allowed_token_ids"):
                if getattr(self, name):
                    self._refuse(name, f"it does not go with {self.grammar.name}; leave one of them out")
        if self.beam_width is not None:
            self._check_search(self.beam_width)
        elif self.length_penalty != 1.0:
            self._refuse("length_penalty", "it needs a beam_width")
        elif self.early_stopping is not False:
            self._refuse("early_stopping", "it needs a beam_width")

    def _check_search(self, width: int) -> None:
        if not 1 <= width <= MAX_SEQUENCES:
            self._refuse("beam_width", f"use 1 to {MAX_SEQUENCES}, or leave it out")
        if self.n > width:
            self._refuse("n", f"a beam search returns at most beam_width ({width}) sequences")
        if self.max_new_tokens == 0:
            self._refuse("max_new_tokens", "a beam search without a step has no sequences; use 1 or more")
        if not -10.0 <= self.length_penalty <= 10.0:
            self._refuse("length_penalty", "use a value in [-10, 10]")
        if self.temperature not in (0.0, 1.0):
            self._refuse("temperature", "a beam search does not sample; leave it out, or use 0 or 1")
        for name, off in (("top_k", -1), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(self, name) != off:
                self._refuse(name, "a beam search does not sample; leave it out")
        if self.stop_regex:
            self._refuse("stop_regex", "a beam search ends at plain strings; use stop")
        if self.seed is not None:
            self._refuse("seed", "a beam search draws nothing; leave it out")
        for name, off in (("frequency_penalty", 0.0), ("presence_penalty", 0.0), ("repetition_penalty", 1.0)):
            if getattr(self, name) != off:
                self._refuse(name, "a beam search compares log-probabilities; leave it out")

    def _check_allowed_ids(self) -> None:
        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKEN_IDS:
            raise ValueError(
                f"allowed_token_ids has {len(self.allowed_token_ids)} ids; use at most {MAX_ALLOWED_TOKEN_IDS}"
            )
        for name in ("item_trie", "beam_width"):
            if getattr(self, name) is not None:
                self._refuse(name, "it does not go with allowed_token_ids; leave one of them out")

    def _check_bad_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise ValueError(f"bad_words has {len(self.bad_words)} words; use at most {MAX_BAD_WORDS}")
        if (length := sum(map(len, self.bad_words))) > MAX_BAD_WORD_CHARS:
            raise ValueError(
                f"bad_words has {length} characters; use at most {MAX_BAD_WORD_CHARS} in all words together"
            )
        if not all(word.strip(" ") for word in self.bad_words):
            self._refuse("bad_words", "an empty word, or spaces alone, bans nothing; drop it")
        for name in ("item_trie", "beam_width", "allowed_token_ids"):
            if getattr(self, name):
                self._refuse(name, "it does not go with bad_words; leave one of them out")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise ValueError(f"stop has {len(self.stop)} strings; use at most {MAX_STOPS}")
        if (length := sum(map(len, self.stop))) > MAX_STOP_CHARS:
            raise ValueError(f"stop has {length} characters; use at most {MAX_STOP_CHARS} in all strings together")
        if not all(self.stop):
            self._refuse("stop", "an empty stop string would end every output at once; drop it")
        if self.stop_regex:
            self._check_stop_regex()

    def _check_stop_regex(self) -> None:
        if len(self.stop_regex) > MAX_STOP_REGEX:
            raise ValueError(f"stop_regex has {len(self.stop_regex)} expressions; use at most {MAX_STOP_REGEX}")
        if (length := sum(map(len, self.stop_regex))) > MAX_STOP_REGEX_CHARS:
            raise ValueError(
                f"stop_regex has {length} characters; use at most {MAX_STOP_REGEX_CHARS} in all expressions together"
            )
        if not all(self.stop_regex):
            self._refuse("stop_regex", "an empty expression would end every output at once; drop it")
        if both := set(self.stop).intersection(self.stop_regex):
            # What matched must say which it was.
            raise ValueError(f"stop_regex holds {min(both)!r}, and so does stop; leave it out of one of them")

    def _refuse(self, field: str, fix: str) -> NoReturn:
        raise ValueError(f"{field} is {getattr(self, field)!r}; {fix}")

    @property
    def num_requests(self) -> int:
        """Sequences that the scheduler sees: a beam search is one, however many results it has."""
        return self.n if self.beam_width is None else 1

    @property
    def num_rows(self) -> int:
        """Rows of the batch that one of these sequences takes."""
        return self.beam_width or 1

    @property
    def has_penalties(self) -> bool:
        """True if tokens that were said before change what comes next."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is always taken (temperature 0, or next to it, or top_k 1)."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1
