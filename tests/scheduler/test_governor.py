from __future__ import annotations

import trio

from trionnx.scheduler.governor import governor_of
from trionnx.scheduler.turns import Ask


class Taker:
    remaining_s = 0.0

    def __init__(self) -> None:
        self.told: list[str] = []

    def granted(self) -> None:
        self.told.append("granted")

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


async def test_one_governor_for_each_adapter() -> None:
    assert governor_of("a") is governor_of("a")
    assert governor_of("a") is not governor_of("b")
    assert governor_of("a").new_run() != governor_of("a").new_run()


def test_each_trio_run_has_its_own() -> None:
    async def main() -> object:
        return governor_of("a")

    assert trio.run(main) is not trio.run(main)
