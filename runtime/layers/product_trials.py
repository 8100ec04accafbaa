"""Finds, when a model is loaded, the fastest form of each of its matrix products on this processor.

Every shape is tried with the model's own weights, as many of them one after the other as it takes to read them from
memory as a real step does. On AMD, oneDNN's packed weights are two to four times as fast as MKL; on Intel less, and not
for every shape.

Other processes may hold the processor while a model is loaded. Then only the largest shapes are tried at once, the rest
compute in the form that won for the largest, and `LateTrials` tries them while the server is idle.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

import torch
from tqdm import tqdm

from ...attention import processor
from ...attention.error_text import describe_error
from .linear import Linear
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
LIMIT_S = 20.0
"""Seconds after which no other shape is tried at start, because other processes hold the processor."""
WORTH_IT = 0.95
"""A form must take less than this share of the time of F.linear to replace it."""
NO_LOSS = 1.05
"""Packed weights, which are taken for all row counts or none, must not take more than this share at any of them."""


class UnusableFormError(RuntimeError):
    """The requested form does not work with this dtype on this processor."""


Timer = Callable[[Callable[[], object]], float]


def choose_products(
    layers: Sequence[Linear], form: str, kept: Collection[Linear] = (), kernel: BlockKernel | None = None
) -> LateTrials | None:
    """Give every layer its product. form: one for all, or "auto" for the fastest, found by trial on a CPU. Weights of a
    dtype for which the processor has no arithmetic are not tried: they are multiplied as float32.

    kept: layers that share their weight with others, so that it cannot be repacked. Where NUMBA is asked for and has no
    kernel for a shape, that is ONEDNN's. Returns what is still to be tried, if anything. Raises UnusableFormError.
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
        choices, late = try_products(layers, kept, kernel) if tries else ({}, None)
    for layer in layers:
        choice = choices.get(_shape(layer), PLAIN)
        choice = choice if choice.keeps_weight or layer not in kept else PLAIN
        layer.use_product(choice, kernel, for_now=late is not None and late.includes_layer(layer))
    return late


def is_widened(weight: torch.Tensor) -> bool:
    """True if "auto" multiplies such weights as float32."""
    return weight.device.type == "cpu" and not processor.multiplies(weight.dtype)


def _forced(layer: Linear, form: str, kernel: BlockKernel | None) -> ProductChoice:
    is_missing = form == NUMBA and not _computes(layer, kernel)
    return ProductChoice.of(ONEDNN if is_missing else form)


def try_products(
    layers: Sequence[Linear],
    kept: Collection[Linear] = (),
    kernel: BlockKernel | None = None,
    timer: Timer | None = None,
) -> tuple[dict[Shape, ProductChoice], LateTrials | None]:
    """The fastest choice for each shape of weight, and the trials that are left for later. A shape of these has the
    choice of the largest one. Logs one line, and one warning if something could not be tried."""
    usable, trouble = usable_forms(_weight(layers[0]), kernel=kernel)
    began = time.perf_counter()
    choices: dict[Shape, ProductChoice] = {}
    left_out: list[list[Linear]] = []
    in_order = sorted(layers, key=_shape)
    groups = [list(group) for _, group in groupby(in_order, key=_shape)]
    groups.sort(key=lambda group: -sum(_weight(layer).nbytes for layer in group))
    for group in tqdm(groups, desc="Trying matrix products", unit="shape", disable=None):
        forms = _forms_for(group, usable, kept, kernel)
        if choices and time.perf_counter() - began > LIMIT_S:
            guess = next(iter(choices.values()))
            choices[_shape(group[0])] = guess if set(guess.forms) <= set(forms) else PLAIN
            left_out.append(group)
        else:
            choices[_shape(group[0])] = _finished(_trial(group, forms, timer, kernel))
    described = ", ".join(f"{out}×{into} {choice}" for (out, into), choice in choices.items())
    logger.info("matrix products, tried in %.1f s: %s", time.perf_counter() - began, described)
    if left_out:
        trouble.append(
            f"{len(left_out)} of {len(groups)} shapes are tried when the server is idle, because the processor is busy"
        )
    if trouble:
        logger.warning("matrix products may be slower than they could be: %s", "; ".join(trouble))
    return choices, LateTrials(left_out, usable, kept, kernel, timer) if left_out else None


class LateTrials:
    """Trials of the shapes for which there was no time at start, in pieces of one product each.

    A form that wins takes over between two pieces. Forms differ in how they round, so the owner continues only while
    nothing is being computed: no request sees its numbers change while it runs. (Between two requests they may, as they
    may from one start to the next.)
    """

    def __init__(
        self,
        groups: Sequence[list[Linear]],
        usable: Sequence[str],
        kept: Collection[Linear] = (),
        kernel: BlockKernel | None = None,
        timer: Timer | None = None,
    ) -> None:
        """groups: layers with weights of one shape. usable, kept, kernel: see `try_products`."""
        self._layers = [layer for group in groups for layer in group]
        self.has_switched = False
        """True if any layer computes in another form than before."""
        self._run = self._trials(list(groups), list(usable), kept, kernel, timer)

    def includes_layer(self, layer: Linear) -> bool:
        return any(layer is each for each in self._layers)

    def try_next_product(self) -> bool:
        """Do the next piece. False once none is left."""
        return next(self._run, None) is not None

    def _trials(
        self,
        groups: list[list[Linear]],
        usable: list[str],
        kept: Collection[Linear],
        kernel: BlockKernel | None,
        timer: Timer | None,
    ) -> Generator[bool, None, None]:
        found: list[str] = []
        for group in groups:
            choice = yield from _trial(group, _forms_for(group, usable, kept, kernel), timer, kernel)
            (out, into), before = _shape(group[0]), group[0].choice
            for layer in group:
                layer.use_product(choice if choice.keeps_weight or layer not in kept else PLAIN, kernel)
                yield True
            self.has_switched |= choice != before
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
    group: Sequence[Linear], forms: Sequence[str], timer: Timer | None, kernel: BlockKernel | None
) -> Generator[bool, None, ProductChoice]:
    """Yields after each product, and returns the best choice for layers of one shape."""
    times = {}
    for rows in ROW_COUNTS:
        times[rows] = yield from _timings(group, rows, forms, timer, kernel)
    return best_choice(times)


T = TypeVar("T")


def _finished(run: Generator[bool, None, T]) -> T:
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
) -> Generator[bool, None, dict[str, float]]:
    """`time_forms`; yields after each product."""
    timer = timer or _seconds
    first = _weight(layers[0])
    out, into = first.shape
    forms = [form for form in forms if form != TRANSPOSED or rows in TRANSPOSED_ROWS]
    rows = max(1, min(rows, int(MAX_FLOPS / (2 * out * into))))
    count = 1 if rows > max(ROW_COUNTS[:-1]) else min(len(layers), -(-TRIED_BYTES // first.nbytes))
    x = torch.randn(rows, into, generator=torch.Generator().manual_seed(rows)).to(first.dtype)
    sources = [Source(_weight(layer), layer.bias, kernel) for layer in layers[:count]]
    products: dict[str, list[Product]] = {form: [] for form in forms}
    for form in forms:
        for source in sources:
            products[form].append(FORMS[form](source))
            yield True
        _run(products[form], x)  # the first call makes room, and chooses a kernel
        yield True
    times, spent = dict.fromkeys(forms, float("inf")), 0.0
    for done in range(ROUNDS.stop):
        if done >= ROUNDS.start and spent > TRIAL_S:
            break
        for form in forms:  # in turns: the machine may be slow for a while
            seconds = timer(lambda form=form: _run(products[form], x))
            times[form], spent = min(times[form], seconds), spent + seconds
            yield True
    return times


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
    out, into = _weight(layer).shape
    return out, into
