"""The page's files: those of the package, by their exact paths."""

from __future__ import annotations

from pathlib import Path

from baton.entrypoints.http.dashboard.dashboard_routes import FIRST, static_files

PAGE = Path(__file__).parents[4] / "entrypoints" / "http" / "dashboard" / "static"


def test_every_page_file_is_served() -> None:
    found = static_files()
    assert FIRST in found and {*found} == {str(file.relative_to(PAGE)) for file in PAGE.rglob("*.*")}
    for name, file in found.items():
        assert file.content == (PAGE / name).read_bytes()


def test_static_files_have_content_types_and_etags(tmp_path: Path) -> None:
    for name in ("a.html", "b.js", "c.css", "d.svg", "e.py", "f", ".js"):
        (tmp_path / name).write_text(name)
    (tmp_path / "g.js").mkdir()
    (tmp_path / "g.js" / "h.js").write_text("h")
    found = static_files(tmp_path)
    assert {name: file.kind.split(";")[0] for name, file in found.items()} == {
        "a.html": "text/html",
        "b.js": "text/javascript",
        "c.css": "text/css",
        "d.svg": "image/svg+xml",
        ".js": "text/javascript",
        "g.js/h.js": "text/javascript",
    }
    assert len({file.tag for file in found.values()}) == 6 and all(
        file.tag[0] == '"' == file.tag[-1] for file in found.values()
    )
    (tmp_path / "b.js").write_text("other")
    assert static_files(tmp_path)["b.js"].tag != found["b.js"].tag
