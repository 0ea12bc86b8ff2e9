from aioengine.core.request import Request
from aioengine.core.waiting import WaitingQueue
from aioengine.messages import AddRequest, ChoiceParams


def make_request(priority: int, arrival: int) -> Request:
    added = AddRequest(request_id="", token_ids=(1,), params=ChoiceParams(max_tokens=1))
    return Request(source="", added=added, order=(priority, arrival), digests=[], max_model_len=8)


def drain(queue: WaitingQueue) -> list[tuple[int, int]]:
    orders = []
    while (request := queue.peek()) is not None:
        queue.discard(request)
        orders.append(request.order)
    return orders


def test_priority_then_arrival() -> None:
    queue = WaitingQueue()
    for order in ((1, 0), (0, 2), (0, 1), (-1, 3)):
        queue.push(make_request(*order))
    assert drain(queue) == [(-1, 3), (0, 1), (0, 2), (1, 0)]


def test_a_request_may_return_to_its_place() -> None:
    queue = WaitingQueue()
    first, second = make_request(0, 0), make_request(0, 1)
    queue.push(second)
    queue.push(first)
    queue.discard(first)
    queue.push(first)
    assert len(queue) == 2
    assert drain(queue) == [(0, 0), (0, 1)]


def test_discarded_requests_leave_no_trace() -> None:
    """Even behind one that stays at the head for ever."""
    queue = WaitingQueue()
    queue.push(make_request(-1, 0))
    for arrival in range(1, 1000):
        request = make_request(0, arrival)
        queue.push(request)
        queue.discard(request)
    assert len(queue) == 1
    assert len(queue._heap) < 100
