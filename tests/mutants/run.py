"""Mutation testing of radix/, scheduler/ and memory_pool/ with mutmut: ``make mutants``; see docs/mutants.md.

A mutant is judged by the tests of its own layer that reach its function, quickest first. mutmut knows a module by its
path, so it works in a folder where ``baton`` lies below ``src``: build/mutants/LAYER. What it found out is kept there
and a later run goes on from it; a function that was changed is tested again.
"""

# pyright: reportMissingImports=false
# mutmut is in an extra of its own.
from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parent.parent.parent
WORK = ROOT / "build" / "mutants"
LAYERS = ("radix", "memory_pool", "scheduler")
COPIED = ("attention", "entrypoints", "memory_pool", "radix", "runtime", "scheduler")
MEMORY_LIMIT = 12 * 2**30
"""Bytes of address space: a mutant that loops for ever may also grow for ever."""

CONFIG = """\
[mutmut]
source_paths = src/baton/{layer}
also_copy =
{copies}
pytest_add_cli_args_test_selection = tests/{layer}
pytest_add_cli_args =
    -m
    not slow and not gpu and not process and not equality
    -p
    no:cacheprovider
    -p
    fewer
    --hypothesis-profile=ci
    -o
    timeout=20
timeout_multiplier = 2
timeout_constant = 10
use_git_change_detection = false
"""

BROAD = (
    "tests/scheduler/test_fairness.py::TestIdleLeases",
    "tests/scheduler/test_fairness.py::TestVictims",
    "tests/scheduler/test_simulation.py::test_simulation[0-64-",
    "tests/scheduler/test_simulation.py::test_simulation_of_mixed_steps[64-",
)
"""Beginnings of the names of tests that are never left out for their time: they look at everything, or alone at what
only shows after many steps."""
SECONDS = 10.0


def prepare(layer: str) -> Path:
    """The folder in which mutmut works on a layer, made if need be."""
    folder = WORK / layer
    folder.mkdir(parents=True, exist_ok=True)
    for name, target in {"src": ".typing", "tests": "tests", "pyproject.toml": "pyproject.toml"}.items():
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(ROOT / target, folder))
    copies = "\n".join(f"    src/baton/{other}" for other in COPIED if other != layer)
    (folder / "setup.cfg").write_text(CONFIG.format(layer=layer, copies=copies))
    return folder


def run_layer(layer: str, targets: list[str], sample: int | None, seconds: float, again: bool) -> None:
    """Test the mutants of a layer whose files begin with any target, in the order in which they are drawn. sample: so
    many of each folder; None: all. seconds: of tests for each mutant. again: survivors, too, as if they were new."""
    os.chdir(prepare(layer))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    from messages import leave_out_messages
    from mutmut import __main__ as mutmut
    from mutmut.state import state
    from mutmut.workers.isolation import ForkRunner
    from sample import drawn, place, within

    leave_out_messages()
    every = mutmut.collect_source_file_mutation_data
    submit = ForkRunner.submit

    def those_wanted(*, mutant_names):
        # Names given to mutmut itself would be tested again each time, and a run that was ended could not go on.
        mutants, files = every(mutant_names=mutant_names)
        prefixes = tuple(f"src/baton/{target}" for target in targets)
        wanted = [entry for entry in mutants if str(entry[0].path).startswith(prefixes)]
        if sample is not None:
            by_folder: dict[Path, list[str]] = {}
            for file, name, _ in wanted:
                by_folder.setdefault(Path(file.path).parent, []).append(name)
            chosen = drawn({str(folder): names for folder, names in by_folder.items()}, sample)
            wanted = [entry for entry in wanted if entry[1] in chosen]
        return [(file, name, None if again and code in (0, 33) else code) for file, name, code in wanted], files

    def quickest(tests):
        return within(seconds, tests, state().duration_by_test, BROAD)

    def submit_with_quickest(runner, mutant, tests, cpu_limit, estimate):
        few = quickest(tests)
        submit(runner, mutant, few, cpu_limit, sum(state().duration_by_test[test] for test in few))

    with (
        mock.patch.object(mutmut, "collect_source_file_mutation_data", those_wanted),
        mock.patch.object(mutmut, "estimated_worst_case_time", place),  # it sorts by this, and uses it for no more
        mock.patch.object(mutmut, "tests_for_mutant_names", lambda _: quickest(state().duration_by_test)),
        mock.patch.object(ForkRunner, "submit", submit_with_quickest),
    ):
        mutmut._run((), 1)


def report(layer: str) -> dict[str, list[str]]:
    """What is known of each file's mutants; the survivors' differences are written to survivors.txt."""
    os.chdir(prepare(layer))
    from mutmut.__main__ import collect_source_file_mutation_data
    from mutmut.configuration import reset_config
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.stats import status_by_exit_code

    reset_config()
    found: dict[str, list[str]] = {}
    differences: list[str] = []
    for file, name, code in collect_source_file_mutation_data(mutant_names=())[0]:
        status = status_by_exit_code[code]
        found.setdefault(str(file.path).removeprefix("src/baton/"), []).append(status)
        if status not in ("killed", "timeout", "not checked"):
            differences.append(f"# {name}: {status}\n{get_diff_for_mutant(name, path=file.path)}")
    Path("survivors.txt").write_text("\n".join(differences))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "targets", nargs="*", default=LAYERS, help="layers, folders or files in them; all layers if none"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="of each folder N mutants only, always the same")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"of tests for each mutant, quickest first ({SECONDS})"
    )
    parser.add_argument("--again", action="store_true", help="test survivors once more: the tests have changed")
    parser.add_argument("--report", action="store_true", help="run nothing, only show what is known")
    options = parser.parse_args()
    if wrong := [target for target in options.targets if target.split("/")[0] not in LAYERS]:
        parser.error(f"{wrong[0]!r} is in none of {', '.join(LAYERS)}")
    targets = {layer: [t for t in options.targets if t.split("/")[0] == layer] for layer in LAYERS}
    layers = [layer for layer in LAYERS if targets[layer]]
    if not options.report and len(layers) > 1:
        for layer in layers:  # mutmut keeps what it knows in globals: one process each
            more = [f"--seconds={options.seconds}"]
            more += [f"--sample={options.sample}"] if options.sample else []
            more += ["--again"] if options.again else []
            subprocess.run([sys.executable, __file__, *targets[layer], *more], check=True)
    elif not options.report:
        run_layer(layers[0], targets[layers[0]], options.sample, options.seconds, options.again)
    from scores import count_by_folder, score_table

    found = {file: statuses for layer in layers for file, statuses in report(layer).items()}
    print(f"\n{score_table(count_by_folder(found))}\n\nsurvivors: {WORK.relative_to(ROOT)}/*/survivors.txt")


if __name__ == "__main__":
    main()
