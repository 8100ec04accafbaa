"""Finds the fastest form of each of a model's matrix products on this processor.

Every shape is tried with the model's own weights, as many of them one after the other as it takes to read them from
memory as a real step does. On AMD, oneDNN's packed weights are two to four times as fast as MKL; on Intel less, and not
for every shape.

No start waits for trials, which take seconds, and minutes where other processes hold the processor. A shape begins with
the form that won at an earlier start, or else with the form that usually wins; `LateTrials` tries the latter while the
server is idle, and keeps the result for the next start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

import torch

from ...attention import processor
from ...attention.error_text import describe_error
from ...attention.trial_results import TrialResults
from .linear import USUAL_MULTIPLE, Linear
from .products import (
    FORMS,
    NUMBA,
    ONEDNN,
    PACKED,
    PLAIN,
    ROW_COUNTS,
    TORCH,
    TRANSPOSED,
    TRANSPOSED_ROWS,
    WIDENED,
    BlockKernel,
    Product,
    ProductChoice,
    Source,
    numba_product,
    onednn_product,
)

logger = logging.getLogger(__name__)

Shape = tuple[int, int]
"""Shape of a weight: (out, in)."""

TRIAL = "matrix product"
"""Kind of trial, see TrialResults."""

SMALL_MODEL_BYTES = 16 << 20
"""Products of smaller models take microseconds, whatever their form: they are not tried."""
TRIED_BYTES = 96 << 20
"""Weights of one shape that are read in turn: more than fits a cache."""
MAX_FLOPS = 1e10
"""A trial of many rows uses fewer where a product would take longer."""
ROUNDS = range(2, 10)
"""Timings of each form, least and most: only while TRIAL_S has not passed more than the least. The best counts."""
TRIAL_S = 0.3
"""Seconds of products, for all forms at one row count."""
BUSY_OTHERS = 0.3
"""Cores that other processes keep busy beside which timings are worth nothing."""
FIRST_WAIT_S = 30.0
LONGEST_WAIT_S = 3600.0
"""Seconds until the next attempt beside busy processes. It doubles each time."""
WORTH_IT = 0.95
"""A form must take less than this share of the time of F.linear to replace it."""
NO_LOSS = 1.05
"""Packed weights, which are taken for all row counts or none, must not take more than this share at any of them."""


class UnusableFormError(RuntimeError):
    """The requested form does not work with this dtype on this processor."""


Timer = Callable[[Callable[[], object]], float]


def choose_products(
    layers: Sequence[Linear],
    form: str,
    kept: Collection[Linear] = (),
    kernel: BlockKernel | None = None,
    results: TrialResults | None = None,
) -> LateTrials | None:
    """Give every layer its product. form: one for all, or "auto" for the fastest, found by trial on a CPU. Weights of a
    dtype for which the processor has no arithmetic are not tried: they are multiplied as float32.

    kept: layers that share their weight with others, so that it cannot be repacked. Where NUMBA is asked for and has no
    kernel for a shape, that is ONEDNN's. results: of earlier trials. Returns what is still to be tried, if anything.
    Raises UnusableFormError.
    """
    late: LateTrials | None = None
    if form != "auto":
        usable, trouble = usable_forms(_weight(layers[0]), [form], kernel)
        if form not in usable:
            raise UnusableFormError(f"--linear-backend {form}: {trouble[0]}; use auto")
        choices = {_shape(layer): _forced(layer, form, kernel) for layer in layers}
        if without := [shape for shape, choice in choices.items() if choice.form(1) != form]:
            shapes = ", ".join(f"{out}×{into}" for out, into in without)
            logger.warning("--linear-backend %s: there is no kernel for %s, which oneDNN multiplies", form, shapes)
    elif is_widened(_weight(layers[0])):
        kind = str(_weight(layers[0]).dtype).removeprefix("torch.")
        logger.info("matrix products: this processor has no arithmetic for %s, so weights are widened to float32", kind)
        choices = {_shape(layer): ProductChoice.of(WIDENED) for layer in layers}
    else:
        size = sum(_weight(layer).nbytes for layer in layers)
        tries = _weight(layers[0]).device.type == "cpu" and size >= SMALL_MODEL_BYTES
        choices, late = first_choices(layers, kept, kernel, results=results) if tries else ({}, None)
    for layer in layers:
        choice = choices.get(_shape(layer), PLAIN)
        layer.use_product(choice if choice.keeps_weight or layer not in kept else PLAIN, kernel)
    return late


def is_widened(weight: torch.Tensor) -> bool:
    """True if "auto" multiplies such weights as float32."""
    return weight.device.type == "cpu" and not processor.multiplies(weight.dtype)


def _forced(layer: Linear, form: str, kernel: BlockKernel | None) -> ProductChoice:
    is_missing = form == NUMBA and not _computes(layer, kernel)
    return ProductChoice.of(ONEDNN if is_missing else form)


def first_choices(
    layers: Sequence[Linear],
    kept: Collection[Linear] = (),
    kernel: BlockKernel | None = None,
    timer: Timer | None = None,
    results: TrialResults | None = None,
) -> tuple[dict[Shape, ProductChoice], LateTrials | None]:
    """For each shape of weight the choice that an earlier trial found, or the usual one, and the trials of the latter.
    Logs one line, and one warning if some form does not work."""
    results = results or TrialResults()
    usable, trouble = usable_forms(_weight(layers[0]), kernel=kernel)
    choices: dict[Shape, ProductChoice] = {}
    untried: list[Group] = []
    in_order = sorted(layers, key=_shape)
    groups = [list(group) for _, group in groupby(in_order, key=_shape)]
    groups.sort(key=lambda group: -sum(_weight(layer).nbytes for layer in group))
    for of_shape in groups:
        group = Group(of_shape, _forms_for(of_shape, usable, kept, kernel), kept)
        choice = group.earlier_choice(results)
        if choice is None:
            choice = usual_choice(group.forms)
            untried.append(group)
        choices[_shape(of_shape[0])] = choice
    described = ", ".join(f"{out}×{into} {choice}" for (out, into), choice in choices.items())
    left = f"; {len(untried)} of {len(groups)} shapes are tried while the server is idle" if untried else ""
    logger.info("matrix products: %s%s", described, left or "; all tried at an earlier start")
    if trouble:
        logger.warning("matrix products may be slower than they could be: %s", "; ".join(trouble))
    return choices, LateTrials(untried, kernel, timer, results) if untried else None


def usual_choice(forms: Collection[str]) -> ProductChoice:
    """Of these usable forms, those that win most trials. Few rows are NUMBA's, so that steps can be recorded."""
    if NUMBA in forms and ONEDNN in forms:
        return ProductChoice((*(NUMBA,) * (len(ROW_COUNTS) - 1), ONEDNN))
    return ProductChoice.of(ONEDNN if ONEDNN in forms else TORCH)


@dataclass(frozen=True)
class Group:
    """Layers with weights of one shape. forms: the usable ones for it."""

    layers: list[Linear]
    forms: list[str]
    kept: Collection[Linear] = ()
    """Layers, of these and others, with weights that cannot be repacked."""

    @cached_property
    def key(self) -> dict[str, Any]:
        """What the fastest form depends on."""
        first = self.layers[0]
        return {
            "shape": list(_shape(first)),
            "layers": len(self.layers),
            "dtype": str(first.dtype).removeprefix("torch."),
            "bias": first.bias is not None,
            "forms": self.forms,
        }

    def earlier_choice(self, results: TrialResults) -> ProductChoice | None:
        """The one that a trial at an earlier start found; None if there was none."""
        found = results.find(TRIAL, self.key, self._is_choice)
        return None if found is None else ProductChoice(tuple(found))

    def _is_choice(self, value: Any) -> bool:
        if (
            not isinstance(value, list)
            or len(value) != len(ROW_COUNTS)
            or not all(form in self.forms for form in value)
        ):
            return False
        return len({form in PACKED for form in value}) == 1

    def use(self, choice: ProductChoice, kernel: BlockKernel | None) -> Generator[float, None, None]:
        for layer in self.layers:
            layer.use_product(choice if choice.keeps_weight or layer not in self.kept else PLAIN, kernel)
            yield 0.0


class LateTrials:
    """Trials of shapes, in pieces of one product each, while nothing else is to be computed.

    A form that wins takes over between two pieces. Forms differ in how they round, so the owner continues only while
    nothing is being computed: no request sees its numbers change while it runs. (Between two requests they may, as they
    may from one start to the next.)
    """

    def __init__(
        self,
        groups: Sequence[Group],
        kernel: BlockKernel | None = None,
        timer: Timer | None = None,
        results: TrialResults | None = None,
        others: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """results: keeps what is found. others: the cores that other processes have kept busy since it was asked
        last."""
        self._results = results or TrialResults()
        self.others = others
        self.has_switched = False
        """True if any layer computes in another form than before."""
        self._run = self._trials(list(groups), kernel, timer)

    def try_next_product(self) -> float | None:
        """Do the next piece. Returns the seconds until the one after it, 0 unless other processes are busy. None once
        none is left."""
        return next(self._run, None)

    def _trials(
        self, groups: list[Group], kernel: BlockKernel | None, timer: Timer | None
    ) -> Generator[float, None, None]:
        found: list[str] = []
        wait = FIRST_WAIT_S
        while groups:
            group = groups[0]
            self.others()
            choice = yield from _trial(group, timer, kernel, lambda: self.others() > BUSY_OTHERS)
            if choice is None:
                logger.info("other processes are busy: matrix products are tried again after %.0f s", wait)
                yield wait
                wait = min(2 * wait, LONGEST_WAIT_S)
                continue
            groups.pop(0)
            before = group.layers[0].choice
            yield from group.use(choice, kernel)
            self._results.keep(TRIAL, group.key, list(choice.forms))
            self.has_switched |= choice != before
            out, into = _shape(group.layers[0])
            found.append(f"{out}×{into} {choice}" + (f", not {before}" if choice != before else ""))
        logger.info("matrix products, tried while the server was idle: %s", "; ".join(found))


def _forms_for(
    group: Sequence[Linear], usable: Sequence[str], kept: Collection[Linear], kernel: BlockKernel | None
) -> list[str]:
    """The usable forms that layers of one shape can have."""
    forms = [form for form in usable if form not in PACKED or not any(layer in kept for layer in group)]
    if NUMBA in forms and not _computes(group[0], kernel):
        forms.remove(NUMBA)
    return forms


def _trial(
    group: Group, timer: Timer | None, kernel: BlockKernel | None, is_busy: Callable[[], bool]
) -> Generator[float, None, ProductChoice | None]:
    """Yields after each product, and returns the best choice for layers of one shape; None if it was cut short."""
    times = {}
    for rows in ROW_COUNTS:
        times[rows] = yield from _timings(group.layers, rows, group.forms, timer, kernel)
        if is_busy():
            return None
    return best_choice(times)


T = TypeVar("T")


def _finished(run: Generator[float, None, T]) -> T:
    """Run a generator to its end and return its result."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value


def usable_forms(
    like: torch.Tensor, tried: Collection[str] | None = None, kernel: BlockKernel | None = None
) -> tuple[list[str], list[str]]:
    """F.linear, those of the tried forms (None: all that can be) that give the right numbers for weights of this dtype,
    and what is wrong with the others."""
    if tried is None:
        tried = [form for form in FORMS if form != WIDENED and (form != NUMBA or kernel is not None)]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 64, generator=generator).to(like.dtype)
    source = Source(weight, torch.randn(128, generator=generator).to(like.dtype), kernel)
    x = torch.randn(5, 64, generator=generator).to(like.dtype)
    assert source.bias is not None
    expected = torch.nn.functional.linear(x.double(), weight.double(), source.bias.double())
    usable, trouble = [TORCH], []
    for name in tried:
        if name == TORCH:
            continue
        try:
            found = FORMS[name](source)(x)
        except Exception as error:  # torch built without oneDNN, or a dtype that it does not know here
            trouble.append(f"{name} failed ({describe_error(error)})")
            continue
        if _are_close(found, expected):
            usable.append(name)
        else:
            trouble.append(f"{name} gives wrong numbers")
    return usable, trouble


def _computes(layer: Linear, kernel: BlockKernel | None) -> bool:
    """True if NUMBA gives the right numbers for this shape: oneDNN's layout may differ from shape to shape."""
    source = Source(_weight(layer), layer.bias, kernel)
    x = torch.randn(5, source.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(source.weight.dtype)
    try:
        return _are_close(numba_product(source)(x), onednn_product(source)(x))
    except ValueError:
        return False


def _are_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if the numbers differ only by rounding. Both were summed in float32 at least, and ``found`` was then
    rounded."""
    eps = torch.finfo(found.dtype).eps
    allowed = 64 * eps if found.dtype == torch.float32 else 4 * eps
    usual = float(expected.double().square().mean().sqrt())
    return torch.allclose(found.double(), expected.double(), atol=allowed * usual, rtol=allowed)


def best_choice(times: Mapping[int, Mapping[str, float]]) -> ProductChoice:
    """times: rows -> form -> seconds. All row counts weigh the same, whatever they take; none may lose."""
    plain = [_faster(of_rows) for of_rows in times.values()]
    if all(ONEDNN in of_rows for of_rows in times.values()):
        packed = [_better_packed(of_rows) for of_rows in times.values()]
        gain = [of_rows[best] / of_rows[form] for of_rows, best, form in zip(times.values(), packed, plain)]
        if sum(gain) < WORTH_IT * len(gain) and max(gain) <= NO_LOSS:
            return ProductChoice(tuple(packed))
    return ProductChoice(tuple(plain))


def _better_packed(of_rows: Mapping[str, float]) -> str:
    """NUMBA unless it is slower by more than a little: its calls can be recorded."""
    if NUMBA in of_rows and WORTH_IT * of_rows[NUMBA] <= of_rows[ONEDNN]:
        return NUMBA
    return ONEDNN


def _faster(of_rows: Mapping[str, float]) -> str:
    """The faster of the forms that read the weight as it is."""
    found = TORCH
    for form, seconds in of_rows.items():
        if form not in PACKED and seconds < WORTH_IT * of_rows[TORCH]:
            found = form
    return found


def time_forms(
    layers: Sequence[Linear],
    rows: int,
    forms: Sequence[str],
    timer: Timer | None = None,
    kernel: BlockKernel | None = None,
) -> dict[str, float]:
    """Seconds by form: all these layers of one shape in turn, with so many rows."""
    return _finished(_timings(layers, rows, forms, timer, kernel))


def _timings(
    layers: Sequence[Linear], rows: int, forms: Sequence[str], timer: Timer | None, kernel: BlockKernel | None
) -> Generator[float, None, dict[str, float]]:
    """`time_forms`; yields after each product."""
    timer = timer or _seconds
    out, into = _shape(layers[0])
    nbytes, dtype = out * into * layers[0].dtype.itemsize, layers[0].dtype
    forms = [form for form in forms if form != TRANSPOSED or rows in TRANSPOSED_ROWS]
    rows = max(1, min(rows, int(MAX_FLOPS / (2 * out * into))))
    count = 1 if rows > max(ROW_COUNTS[:-1]) else min(len(layers), -(-TRIED_BYTES // nbytes))
    x = torch.randn(rows, into, generator=torch.Generator().manual_seed(rows)).to(dtype)
    sources: list[Source] = []
    for layer in layers[:count]:
        sources.append(_trial_source(layer, kernel))
        yield 0.0
    products: dict[str, list[Product]] = {form: [] for form in forms}
    for form in forms:
        for source in sources:
            products[form].append(FORMS[form](source))
            yield 0.0
        _run(products[form], x)  # the first call makes room, and chooses a kernel
        yield 0.0
    times, spent = dict.fromkeys(forms, float("inf")), 0.0
    for done in range(ROUNDS.stop):
        if done >= ROUNDS.start and spent > TRIAL_S:
            break
        for form in forms:  # in turns: the machine may be slow for a while
            seconds = timer(lambda form=form: _run(products[form], x))
            times[form], spent = min(times[form], seconds), spent + seconds
            yield 0.0
    return times


def _trial_source(layer: Linear, kernel: BlockKernel | None) -> Source:
    """The layer's operands. If a packed weight is too large to be unpacked beside it, made-up ones of fewer outputs."""
    outs = TRIED_BYTES // (layer.in_features * layer.dtype.itemsize) // USUAL_MULTIPLE * USUAL_MULTIPLE
    if layer.weight is not None or layer.out_features <= max(outs, USUAL_MULTIPLE):
        return layer.source(kernel)
    weight = torch.full((max(outs, USUAL_MULTIPLE), layer.in_features), 0.01, dtype=layer.dtype)
    return Source(weight, None if layer.bias is None else layer.bias[: len(weight)], kernel)


def _run(products: list[Product], x: torch.Tensor) -> None:
    for product in products:
        product(x)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _weight(layer: Linear) -> torch.Tensor:
    assert layer.weight is not None, "the product has not been chosen yet"
    return layer.weight


def _shape(layer: Linear) -> Shape:
    return layer.out_features, layer.in_features
