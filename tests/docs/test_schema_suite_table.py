"""The table of JSON Schema's test suite is that of this version, and no invalid example passes."""

import pytest

from docs.schema_suite_table import PAGE, written


@pytest.mark.slow
def test_schema_suite_table_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == written(page), "run: python -m docs.schema_suite_table"
