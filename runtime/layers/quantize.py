"""Makes weights in few bits from float ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .quantized_weights import FLOAT8, Float8Weight, PackedWeight, QuantForm, QuantizedWeight, WeightForm

SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's range that are tried for 4 bits: what lies outside is cut off, and the rest rounded more finely.
The smallest squared error wins."""

ROWS = 4096
"""Outputs that are quantised at a time, so that little memory is taken beside the result."""


def quantize(weight: torch.Tensor, form: QuantForm) -> QuantizedWeight:
    """A float weight [out, in], finite, rounded to the nearest numbers of the form."""
    out, into = weight.shape
    found = QuantizedWeight.empty(out, into, form)
    for begin in range(0, out, ROWS):
        part = slice(begin, begin + ROWS)
        _fill(found.outputs(part), weight[part].float())
    return found


def narrowed(weight: torch.Tensor, form: WeightForm) -> torch.Tensor | PackedWeight:
    """A float weight [out, in], finite, in the form."""
    if isinstance(form, QuantForm):
        return quantize(weight, form)
    return _float8(weight) if form == FLOAT8 else weight.to(form)


def _float8(weight: torch.Tensor) -> Float8Weight:
    """With one scale for each output, so that its largest number is the type's largest."""
    found = Float8Weight(torch.empty(weight.shape, dtype=FLOAT8), torch.empty(len(weight), 1), 0)
    largest = torch.finfo(FLOAT8).max
    for begin in range(0, len(weight), ROWS):
        part = weight[begin : begin + ROWS].float()
        scales = (part.abs().amax(1, keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
        # Beyond its largest number the type has only NaN.
        found.codes[begin : begin + ROWS] = (part / scales).clamp(-largest, largest).to(FLOAT8)
        found.scales[begin : begin + ROWS] = scales
    return found


def _fill(target: QuantizedWeight, weight: torch.Tensor) -> None:
    """Write a float32 weight into the memory of the target."""
    form, into = target.form, weight.shape[1]
    group = form.group or into
    # All rows to a like size: squared errors stay finite, and tables in float16 fine.
    top = weight.abs().amax(1)
    factors = torch.where(top > 0, top.log2().floor().clamp(min=-120).exp2(), 1.0)
    groups = F.pad(weight / factors[:, None], (0, -into % group)).unflatten(1, (-1, group))
    if form.has_mins:
        scales, mins = _range(groups, form)
    else:
        scales = groups.abs().amax(2) / (form.offset - 1)
        mins = torch.zeros_like(scales)
    if target.scales is None:
        target.rows.copy_(scales[:, 0] * factors)
    else:
        target.rows.copy_(factors)
        target.scales.copy_(scales)
        scales = target.scales.float()
    if target.mins is not None:
        target.mins.copy_(mins)
        mins = target.mins.float()
    codes = _codes(groups, scales, mins, form).to(torch.uint8).flatten(1)[:, :into]
    target.codes.copy_(codes if form.bits == 8 else codes[:, ::2] | (codes[:, 1::2] << 4))


def _range(groups: torch.Tensor, form: QuantForm) -> tuple[torch.Tensor, torch.Tensor]:
    """groups: float32 [out, groups, group] -> scales and minima [out, groups]: of those tried the ones with the
    smallest squared error."""
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    best = torch.full_like(low, float("inf")), low, low
    for share in SHRUNK if form.bits == 4 else SHRUNK[:1]:
        scales, mins = share * (high - low) / ((1 << form.bits) - 1), -share * low
        rounded = _codes(groups, scales, mins, form) * scales[:, :, None] - mins[:, :, None]
        error = (rounded - groups).square_().sum(2)
        is_better = error < best[0]
        found = zip((error, scales, mins), best)
        best = tuple(torch.where(is_better, new, old) for new, old in found)
    return best[1], best[2]


def _codes(groups: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor, form: QuantForm) -> torch.Tensor:
    """The nearest codes, as floats. Where a scale is 0, so is the number."""
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    codes = (groups + mins[:, :, None]).mul_(inverse[:, :, None]).round_().add_(form.offset)
    return codes.clamp_(1 if form.offset else 0, (1 << form.bits) - 1)
