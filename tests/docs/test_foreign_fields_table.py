"""The page of other servers' fields is what the code does."""

from __future__ import annotations

from baton.entrypoints.fields.foreign_fields import FOREIGN_FIELDS
from docs.foreign_fields_table import PAGE, written


def test_foreign_fields_table_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == written(page), "run: python -m docs.foreign_fields_table"
    assert all(f"`{field.name}`" in page for field in FOREIGN_FIELDS)
