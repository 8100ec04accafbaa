"""What is left out of a mutation run."""

from __future__ import annotations

import pytest

cst = pytest.importorskip("libcst", reason="mutmut is in the extra [mutants]")
messages = pytest.importorskip("tests.mutants.messages", reason="mutmut is in the extra [mutants]")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('"use a smaller batch"', True),
        ('f"{count} tokens"', True),
        ('"first" "second"', False),
        ('f"{count} of " f"{total}"', True),
        ('"kv_pool_exceeded"', False),
        ('f"<{count}i"', False),
        ("count + 1", False),
    ],
)
def test_strings_with_spaces_are_messages(code: str, expected: bool) -> None:
    assert messages.is_message(cst.parse_expression(code)) is expected


def test_argument_mutants_keep_the_message() -> None:
    call = cst.parse_expression('Refused(f"{n} are too many", status, code="full")')
    found = {cst.Module([]).code_for_node(mutant) for mutant in messages.fewer_arguments(call)}
    assert found == {
        'Refused(f"{n} are too many", None, code="full")',
        'Refused(f"{n} are too many", status, code=None)',
        'Refused(f"{n} are too many", code="full")',
        'Refused(f"{n} are too many", status, )',
    }
