"""Writes the table in foreign_fields.md. Run ``python -m docs.foreign_fields_table`` in the root folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton.entrypoints.fields.foreign_fields import ENDPOINT_OF, ENDPOINTS, FOREIGN_FIELDS, ForeignField

PAGE = Path(__file__).parent / "foreign_fields.md"
BEGIN, END = "<!-- fields -->\n", "\n<!-- end of fields -->"


def table() -> str:
    """One row for neighbours that differ in nothing but their names."""
    lines = ["| fields | sent by | at | effect |", "|---|---|---|---|"]
    names: list[str] = []
    for field, following in zip(FOREIGN_FIELDS, (*FOREIGN_FIELDS[1:], None), strict=True):
        names.append(f"`{field.name}`")
        if following is None or _row(following) != _row(field):
            lines.append(f"| {', '.join(names)} | {' | '.join(_row(field))} |")
            names = []
    return "\n".join(lines)


def _row(field: ForeignField) -> tuple[str, str, str]:
    at = ", ".join(f"`{ENDPOINT_OF[api]}`" for api in field.apis if api != "sampling_params")
    if set(ENDPOINTS) <= set(field.apis):
        at = "all"
    if "sampling_params" in field.apis:
        at = ", ".join(filter(None, (at, "`sampling_params`")))
    off = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in field.off)
    about = f"{field.outcome}{': ' if field.about else ''}{field.about}{f' ({off})' if off else ''}"
    return field.of, at, about.replace("|", "&#124;")


def written(page: str) -> str:
    """The page with the table as it should be."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}"


def main() -> None:
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
