from __future__ import annotations

import trio
from trio.testing import MockClock

from trionnx.scheduler.governor import LOOK_S, governor_of
from trionnx.scheduler.turns import Ask


class Taker:
    remaining_s = 0.0

    def __init__(self) -> None:
        self.told: list[str] = []

    def granted(self) -> None:
        self.told.append("granted")

    def look(self) -> None:
        self.told.append("look")

    def recall(self) -> None:
        self.told.append("recall")


async def test_takers_are_told_and_forgotten() -> None:
    governor, one, other = governor_of("a"), Taker(), Taker()
    for _ in range(3):
        governor.ask(one, Ask(1, 1, ahead=1))
    contended = [governor.contended]
    governor.ask(other, Ask(2, 1, share=2))
    contended.append(governor.contended)
    assert contended == [False, True]
    assert (one.told, other.told) == (["granted", "granted", "recall"], [])
    governor.returned(1, 0.0)
    governor.leave(1, in_flight=1)
    assert other.told == []
    governor.returned(1, 0.005)
    assert other.told == ["granted"]
    governor.leave(1, 0)
    governor.leave(2, 0)
    assert governor.state.runs == frozenset()
    assert governor._takers == {}


async def test_who_waits_is_told_to_look_again_now_and_then(autojump_clock: MockClock) -> None:
    """At most each `LOOK_S`, and only when others had turns."""
    governor, one, other = governor_of("c"), Taker(), Taker()
    governor.ask(one, Ask(1, 1))
    governor.ask(other, Ask(2, 1, deadline=5.0))
    for since_s, looks in ((0.5, 0), (0.6, 1), (0.5, 1), (0.6, 2)):
        governor.ask(one, Ask(1, 1, deadline=1.0))
        await trio.sleep(since_s * LOOK_S)
        governor.returned(1, 0.005)
        assert other.told.count("look") == looks
    governor.ask(other, Ask(2, 1, deadline=0.5))
    governor.returned(1, 0.005)
    assert "granted" in other.told
    governor.leave(1, 0)
    governor.leave(2, 0)
    assert governor._looked == {}


async def test_one_governor_for_each_adapter() -> None:
    assert governor_of("a") is governor_of("a")
    assert governor_of("a") is not governor_of("b")
    assert governor_of("a").new_run() != governor_of("a").new_run()


def test_each_trio_run_has_its_own() -> None:
    async def main() -> object:
        return governor_of("a")

    assert trio.run(main) is not trio.run(main)
