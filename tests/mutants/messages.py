"""Which mutants are not made: those that change nothing but the text of a message."""

# pyright: reportMissingImports=false
# mutmut is in an extra of its own.
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import libcst as cst
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal


def is_message(node: cst.CSTNode) -> bool:
    """True for a string for people to read: one with a blank in it. Names, codes and formats have none."""
    if isinstance(node, cst.ConcatenatedString):
        return is_message(node.left) or is_message(node.right)
    if isinstance(node, cst.FormattedString):
        return any(isinstance(part, cst.FormattedStringText) and " " in part.value for part in node.parts)
    return isinstance(node, cst.SimpleString) and " " in node.value


def fewer_arguments(node: cst.Call) -> Iterable[cst.Call]:
    """mutmut's calls with an argument less, but for those that lack a message."""
    for mutant in operator_arg_removal(node):
        gone = (arg.value for arg in node.args if all(arg is not kept for kept in mutant.args))
        if not any(map(is_message, gone)):
            yield mutant


def leave_out_messages() -> None:
    """Have mutmut make no mutants within messages, nor such as drop a message from a call."""
    skips = MutationVisitor._skip_node_and_children

    def skips_messages(self: MutationVisitor, node: cst.CSTNode) -> bool:
        return is_message(node) or skips(self, node)

    MutationVisitor._skip_node_and_children = skips_messages
    operators: list[tuple[type, Callable[[Any], Iterable[cst.CSTNode]]]] = mutation_operators  # type: ignore[assignment]
    operators[:] = [(kind, fewer_arguments if make is operator_arg_removal else make) for kind, make in operators]
