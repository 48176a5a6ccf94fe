from __future__ import annotations

import threading

from trionnx.gpu.device.thread import QueueThread

LIMIT_S = 30


class Gpu:
    """Submissions that finish when they are told to."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.finished = [threading.Event() for _ in range(10)]

    def wait(self, number: int) -> None:
        assert self.finished[number].wait(LIMIT_S)


def start(most):
    gpu = Gpu()
    thread = QueueThread("test")
    thread.wait_for = gpu.wait

    def submit(number):
        thread.make_room(most)
        gpu.events.append(f"submit {number}")
        thread.launched(number, 0.0, lambda seconds, error: gpu.events.append(f"fence {number}"))

    return gpu, thread, submit


def settle(thread):
    """Wait until everything that was posted before has been done."""
    done = threading.Event()
    thread.post(thread.drain)
    thread.post(done.set)
    assert done.wait(LIMIT_S)


def test_no_more_than_the_bound_are_in_flight():
    gpu, thread, submit = start(2)
    reached = threading.Event()
    for number in range(2):
        thread.post(lambda number=number: submit(number))
    thread.post(reached.set)
    thread.post(lambda: submit(2))
    assert reached.wait(LIMIT_S)
    assert gpu.events == ["submit 0", "submit 1"]
    for event in gpu.finished:
        event.set()
    settle(thread)
    assert gpu.events == ["submit 0", "submit 1", "fence 0", "submit 2", "fence 1", "fence 2"]
    thread.post(thread.finish)


def test_fences_come_without_further_jobs():
    gpu, thread, _ = start(2)
    gpu.finished[0].set()
    fenced = threading.Event()

    def launch():
        thread.launched(0, 0.0, lambda seconds, error: fenced.set())

    thread.post(launch)
    assert fenced.wait(LIMIT_S)
    thread.post(thread.finish)


def test_a_thread_that_has_ended_takes_no_jobs():
    _, thread, _ = start(1)
    ended = threading.Event()
    thread.post(ended.set)
    thread.post(thread.finish)
    assert ended.wait(LIMIT_S)
    thread._thread.join(LIMIT_S)
    assert not thread.post(lambda: None)


def test_a_fence_that_cannot_be_waited_for_is_told_and_the_thread_lives_on():
    gpu, thread, submit = start(2)
    lost = OSError("gone")

    def wait(number):
        if number == 1:
            raise lost

    thread.wait_for = wait
    told = []
    for number in range(3):
        thread.post(lambda n=number: thread.launched(n, 0.0, lambda seconds, error: told.append((n, error))))
    settle(thread)
    assert told == [(0, None), (1, lost), (2, None)]
    thread.post(lambda: submit(3))
    settle(thread)
    assert gpu.events == ["submit 3", "fence 3"]
    thread.post(thread.finish)
