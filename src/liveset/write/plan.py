"""Who takes which inputs: spans of inputs, and how they are shared out. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Contiguous inputs whose samples go into chunks of their own.

    Attributes:
        start: the first input.
        skip: how many samples of the first input are in earlier chunks already.
        stop: where the inputs end.
    """

    start: int
    skip: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def share(spans: Sequence[Span], workers: int, *, weights: Sequence[float] | None = None, align: int | None = None) -> list[list[Span]]:
    """Share out the inputs of some spans among workers, in order, in contiguous parts.

    Args:
        spans: the inputs that are left to do, in order.
        workers: how many parts are wanted; fewer come back where there are not enough inputs.
        weights: how much work each input is, by its position; without them all count the same.
        align: where a span is cut, the part before the cut holds a multiple of this many inputs.

    Returns:
        For each worker its spans.
    """
    lengths = [len(span) for span in spans]
    total = sum(lengths)
    cuts = _cuts(spans, total, workers, weights)
    if align is not None:
        cuts = _aligned(cuts, lengths, align)
    bounds = [0, *cuts, total]
    parts = [_part(spans, start, stop) for start, stop in pairwise(bounds)]
    return [part for part in parts if part]


def _cuts(spans: Sequence[Span], total: int, workers: int, weights: Sequence[float] | None) -> list[int]:
    """Return after how many inputs each part but the last ends."""
    if weights is not None:
        sums = list(accumulate(weights[at] for span in spans for at in range(span.start, span.stop)))
        if sums and sums[-1] > 0:
            return [bisect_left(sums, sums[-1] * number / workers) + 1 for number in range(1, workers)]
    # The last parts get one more, as in the old tool.
    width, more = divmod(total, workers)
    return list(accumulate(width + (number >= workers - more) for number in range(workers)))[:-1]


def _aligned(cuts: Sequence[int], lengths: Sequence[int], align: int) -> list[int]:
    starts = [0, *accumulate(lengths)]
    moved = []
    for cut in cuts:
        number = bisect_left(starts, cut + 1) - 1
        start, end = starts[number], starts[min(number + 1, len(starts) - 1)]
        whole = start + round((cut - start) / align) * align
        moved.append(min(whole, end))
    return moved


def _part(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    """Return the inputs number ``start`` to ``stop`` of all spans."""
    part, at = [], 0
    for span in spans:
        first, last = max(start - at, 0), min(stop - at, len(span))
        if first < last:
            part.append(Span(span.start + first, span.skip if first == 0 else 0, span.start + last))
        at += len(span)
    return part
