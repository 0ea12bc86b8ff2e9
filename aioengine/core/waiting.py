"""The queue of requests that have no slot."""

import heapq

from aioengine.core.request import Order, Request


class WaitingQueue:
    """Best (priority, arrival) first. push and pop are O(log n), discard is O(1) on average.

    Discarded requests leave their order in the heap; it is rebuilt before they are the majority.
    """

    def __init__(self) -> None:
        self._requests: dict[Order, Request] = {}
        self._heap: list[Order] = []

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        self._requests[request.order] = request
        heapq.heappush(self._heap, request.order)

    def peek(self) -> Request | None:
        """The best one, which stays; None when nobody waits."""
        while self._heap and self._heap[0] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0]] if self._heap else None

    def discard(self, request: Request) -> None:
        """Take out a request at any place: admitted, aborted or failed."""
        del self._requests[request.order]
        if len(self._heap) > 2 * len(self._requests) + 64:
            self._heap = list(self._requests)
            heapq.heapify(self._heap)
