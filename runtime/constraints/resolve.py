"""Finds the constraint that a request's sampling parameters name."""

from __future__ import annotations

from ...scheduler.constraints.allowed_ids import AllowedIds
from ...scheduler.constraints.constraint import Constraint
from ...scheduler.constraints.item_trie import ItemConstraint
from ...scheduler.sampling_params import SamplingParams
from .grammars import Grammars
from .item_tries import ItemTries
from .structural_tags import item_tries


def resolve_constraint(
    sampling: SamplingParams, tries: ItemTries, grammars: Grammars, client: str = ""
) -> Constraint | None:
    """None without one. A grammar may still be compiling; ``client``: in its turn. Raises RequestRefused for an unknown
    trie."""
    if sampling.allowed_token_ids:
        return AllowedIds(sampling.allowed_token_ids)
    if sampling.grammar is not None:
        if names := item_tries(sampling.grammar.source):
            return grammars.with_items(sampling.grammar, {name: tries.get(name) for name in names}, client)
        return grammars.constraint(sampling.grammar, client)
    return None if sampling.item_trie is None else ItemConstraint(tries.get(sampling.item_trie), sampling.item_trie)
