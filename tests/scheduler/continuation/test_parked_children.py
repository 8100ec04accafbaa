"""Children that wait for a running parent: their order, and that none is searched for among its siblings."""

from __future__ import annotations

from baton.scheduler.continuation.records import ParkedChildren
from baton.scheduler.request import Request
from baton.scheduler.request_spec import ContinuationSpec
from tests.doubles.specs import make_spec


class CountingRequest(Request):
    """Counts how often it is compared with another request."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountingRequest.comparisons += 1
        return self is other

    __hash__ = object.__hash__


def child(number: int, parent: str = "p", index: int = 0) -> Request:
    spec = make_spec(f"c{number}", [1], continuation=ContinuationSpec(parent, index))
    return CountingRequest(spec, index=0, seed=0, arrival=0.0, serial=number)


def test_parked_children_are_taken_once_in_arrival_order() -> None:
    parked = ParkedChildren()
    children = [child(number) for number in range(5)]
    others = [child(7, "p", 1), child(8, "q")]
    for request in (*children, *others):
        parked.park_child(request)
    parked.remove_child(children[2])
    rest = [*children[:2], *children[3:]]
    assert parked.waiting_for("p", 0) == rest
    assert parked.take_children("p", 0) == rest
    assert parked.take_children("p", 0) == [] == parked.waiting_for("p", 0)
    parked.remove_child(children[0])  # taken already: nothing happens
    assert parked.take_children("p", 1) == others[:1] and parked.take_children("q", 0) == others[1:]


def test_waiting_for_returns_a_copy() -> None:
    parked = ParkedChildren()
    first, second = child(0), child(1)
    parked.park_child(first)
    waiting = parked.waiting_for("p", 0)
    parked.park_child(second)
    parked.remove_child(first)
    assert waiting == [first]


def test_removing_parked_child_does_not_scan_siblings() -> None:
    parked = ParkedChildren()
    children = [child(number) for number in range(500)]
    for request in children:
        parked.park_child(request)
    CountingRequest.comparisons = 0
    for request in reversed(children):
        parked.remove_child(request)
    assert CountingRequest.comparisons < 500, "a search would take 125,000"
    assert parked.waiting_for("p", 0) == []
