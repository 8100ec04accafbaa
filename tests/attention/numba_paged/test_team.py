"""Compiled functions on torch's threads."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baton.attention.numba_paged import team
from baton.attention.numba_paged.team import Call, NoTeamError, Team

numba = pytest.importorskip("numba")


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_thread_makes_one_call(threads: int) -> None:
    from baton.attention.numba_paged.operations import fetch_add

    @numba.cfunc("void(int64)")
    def count(address):  # type: ignore[no-untyped-def]
        fetch_add(address, 1)

    call = Call(count, 1)
    for _ in range(20):
        Team().run(call, threads)
    assert call.arguments[0] == 20 * threads


def test_team_reuses_torch_threads() -> None:
    """No second set is made: it would spin on the same cores."""
    torch.ones(1 << 20).add_(1)
    before = len(list(Path("/proc/self/task").iterdir()))
    test_each_thread_makes_one_call(max(1, torch.get_num_threads()))
    torch.ones(1 << 20).add_(1)
    assert len(list(Path("/proc/self/task").iterdir())) <= max(before, torch.get_num_threads() + before - 1)
    assert "omppool" not in Path("/proc/self/maps").read_text()


def test_missing_or_ambiguous_openmp_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda self: "7f00-7f01 r-xp 0 0 0 /lib/libm.so.6\n")
        with pytest.raises(NoTeamError, match="torch uses no OpenMP library"):
            Team()
    two = "7f r-xp 0 0 0 /a/libgomp.so.1\n7f r-xp 0 0 0 /b/libiomp5.so\n"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda self: two)
        with pytest.raises(NoTeamError, match="torch uses one of"):
            Team()


def test_openmp_library_without_gomp_parallel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda self: "7f r-xp 0 0 0 /x/libgomp.so.1\n")
        patch.setattr(ctypes, "CDLL", lambda path: object())
        with pytest.raises(NoTeamError, match="has no GOMP_parallel"):
            Team()
    assert team._openmp_library()


def test_library_of_torch_is_found_where_the_environment_is_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a library of another package. /proc/self/maps has no links."""
    real, link = tmp_path.resolve() / "packages", tmp_path / "link"
    own, other = real / "torch" / "lib" / "libgomp.so.1", real / "other.libs" / "libgomp.so.1"
    real.mkdir()
    link.symlink_to(real)
    maps = "".join(f"7f r-xp 0 0 0 {path}\n" for path in (own, other))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__file__", str(link / "torch" / "__init__.py"))
        patch.setattr(Path, "read_text", lambda self: maps)
        patch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(GOMP_parallel=None, GOMP_barrier=None))
        assert team._openmp_library() == str(own)
