"""Hand-made recordings. Times are in milliseconds."""

from array import array
from collections.abc import Sequence

from aioengine.timeline.probe import KINDS, Kind, Lane
from aioengine.trace_messages import RecordedSteps, StepNote

MS = 10**6
LANE_OF = {Kind.HAND_OVER: Lane.HAND_OVER, Kind.HAND_BACK: Lane.HAND_BACK, Kind.PLAN: Lane.LOOP}


def step(seq: int, began: float, ended: float, requests: int = 2, tokens: int = 2) -> StepNote:
    return StepNote(seq, int(began * MS), int(ended * MS), requests, tokens)


def recorded(
    steps: Sequence[StepNote], spans: Sequence[tuple[Kind, float, float]], error: str = ""
) -> RecordedSteps:
    """Spans of steps are added; kinds that are none of a loop's are the device thread's."""
    rows = array("q")
    for kind, began, ended in spans:
        lane = LANE_OF.get(kind, Lane.DEVICE)
        rows.extend((KINDS.index(kind), lane, int(began * MS), int(ended * MS)))
    for note in steps:
        rows.extend((KINDS.index(Kind.STEP), Lane.DEVICE, note.began_ns, note.ended_ns))
    return RecordedSteps(
        steps=tuple(steps), kinds=KINDS, spans=rows.tobytes(), is_cut=False, error=error
    )
