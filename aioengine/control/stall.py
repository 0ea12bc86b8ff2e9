"""Which ranks hold up a step that does not end, judged by their last heartbeats. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from aioengine.messages import Heartbeat, RankInfo


@dataclass(frozen=True, slots=True)
class Sign:
    """The last sign of life of a rank, `age_s` seconds ago."""

    beat: Heartbeat
    age_s: float

    def __str__(self) -> str:
        beat = self.beat
        return f"{beat.where} for {beat.doing_s + self.age_s:.1f} s, job {beat.last_seq} done"


@dataclass(frozen=True, slots=True)
class Stall:
    """`suspects` are those that keep the others waiting, `silent` those that do not even beat."""

    text: str
    suspects: list[RankInfo]
    silent: list[RankInfo]


def find_stall(step: int, signs: Mapping[RankInfo, Sign | None], silent_after_s: float) -> Stall:
    """Of the ranks that have not completed `step`, those to blame do not beat; else those that
    wait in no operation, as the others wait for them. All may wait, when ranks have diverged.

    `signs` of every rank of the replica, None where there was none.
    """
    behind = {info: sign for info, sign in signs.items() if sign is None or _is_in(step, sign.beat)}
    silent = [info for info, sign in behind.items() if sign is None or sign.age_s > silent_after_s]
    busy = [info for info, sign in behind.items() if sign is not None and not sign.beat.operation]
    suspects = silent or busy
    texts = []
    for info, sign in signs.items():
        who = f"rank {info.rank}" if suspects or info not in behind else str(info)
        texts.append(f"{who} is " + ("silent" if sign is None else f"in {sign}"))
    return Stall("; ".join(texts), suspects, silent)


def _is_in(step: int, beat: Heartbeat) -> bool:
    """The rank computes this step or has not come to it."""
    return 0 < beat.step <= step or beat.last_seq < step
