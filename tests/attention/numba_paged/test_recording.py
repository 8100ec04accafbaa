"""Calls that are recorded and run as one."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

pytest.importorskip("numba")

from baton.attention.numba_paged.copying import RowCopy
from baton.attention.numba_paged.recording import Arena, NotRecordable, TeamRecorder
from baton.attention.numba_paged.team import Team

FLOAT, BRAIN = torch.float32, torch.bfloat16


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def chain(team: Team, size: int, length: int):
    """x -> x, rounded, through ``length`` copies, each of what the one before it wrote."""
    there, back = RowCopy(team, size, FLOAT, BRAIN), RowCopy(team, size, BRAIN, FLOAT)

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            x = back(there(x))
        return x

    return run


@pytest.mark.usefixtures("threads")
def test_replay_recomputes_all_calls_in_order() -> None:
    team = Team()
    run, x = chain(team, 33, 20), torch.zeros(50, 33)
    output, replay = TeamRecorder(team).record(lambda: run(x))
    for seed in range(50):
        x.normal_(generator=torch.Generator().manual_seed(seed))
        replay()
        assert torch.equal(output, x.to(BRAIN).float())


def test_recording_computes_nothing_until_replay() -> None:
    team, x = Team(), torch.ones(4, 8)
    copy = RowCopy(team, 8, FLOAT, FLOAT)
    output, replay = TeamRecorder(team).record(lambda: copy(x))
    output.zero_()
    assert not output.any()
    replay()
    assert output.all()
    assert torch.equal(copy(x), x), "calls are run again once nothing is recorded any more"


def test_a_recording_keeps_its_tensors_alive() -> None:
    team, x = Team(), torch.ones(64, 64)
    output, replay = TeamRecorder(team).record(lambda: chain(team, 64, 4)(x))
    gc.collect()
    others = [torch.full((64, 64), 7.0) for _ in range(64)]
    replay()
    assert torch.equal(output, x) and all((other == 7).all() for other in others)


def test_recordings_reuse_arena_memory() -> None:
    team, x = Team(), torch.ones(10, 16)
    recorder = TeamRecorder(team)
    run = chain(team, 16, 30)
    outputs = [recorder.record(lambda rows=rows: run(x[:rows])) for rows in (10, 7, 3)]
    needed = 10 * 16 * (2 * 4 + 2)  # what is read and what is written, in turns
    taken = sum(block.nbytes for block in recorder._arena._blocks)
    assert taken <= needed + 3 * 10 * 16 * 4, "and what the recordings return"
    for _, replay in outputs:
        replay()
    assert all(output.shape[0] == rows and output.all() for (output, _), rows in zip(outputs, (10, 7, 3)))


def test_arena_memory_is_reused_after_last_view_is_gone() -> None:
    arena = Arena()
    first = arena.empty((4, 8), FLOAT)
    view = first[1:].unflatten(1, (2, 4))
    place = first.data_ptr()
    del first
    second = arena.empty((4, 8), FLOAT)
    assert second.data_ptr() != place
    del view
    assert arena.empty((2, 8), BRAIN).data_ptr() == place
    assert place % 64 == 0 and arena.empty((0, 8), FLOAT).shape == (0, 8)


def test_recording_torch_operations_is_refused() -> None:
    team, x = Team(), torch.ones(4, 8)
    with pytest.raises(NotRecordable, match=r"aten\.add\.Tensor is torch's"):
        TeamRecorder(team).record(lambda: x + 1)
    assert team.recorder is None, "calls are run again"


START = """
import sys
import torch
from baton.attention.numba_paged import recording
from baton.attention.numba_paged.team import Team
from baton.attention.probe import DECODE, probe_backend
from baton.attention.backend import AttentionSpec
from baton.attention.torch_native import TorchNativeBackend
probe_backend(lambda pool, specs: TorchNativeBackend(pool), [AttentionSpec(0, 2, 1, 16, 0.25)], [DECODE], page_size=1,
              dtype=torch.float32, device=torch.device("cpu"))
x = torch.zeros(4)
recording.TeamRecorder(Team()).record(lambda: x[1:].view(3, 1))
print(*sorted({"torch._dynamo", "torch.distributed.tensor", "sympy"} & set(sys.modules)))
"""


def test_a_start_imports_no_compiler_of_torch() -> None:
    """They took six of its seconds."""
    found = subprocess.run([sys.executable, "-P", "-c", START], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == ""
