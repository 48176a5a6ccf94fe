"""The thread of one queue: it alone encodes, submits, and waits for fences.

One thread that alternates submit and wait, never two: on some drivers a blocking poll in a second
thread makes `submit` wait for whatever is running.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["QueueThread"]

Job = Callable[[], None]
Fence = Callable[[float, BaseException | None], None]


class QueueThread:
    """Runs jobs in order and keeps a bounded number of submissions in flight.

    Args:
        name: of the thread.

    A job must not raise: errors are the job's to answer for.
    """

    def __init__(self, name: str) -> None:
        self._jobs: deque[Job] = deque()
        self._wake = threading.Condition()
        self._flight: deque[tuple[Any, float, Fence]] = deque()
        self._last_fence = 0.0
        self._stopping = False
        self.wait_for: Callable[[Any], None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, job: Job) -> bool:
        """Have a job done after those before it; from any thread. False: the thread has ended."""
        with self._wake:
            if self._stopping:
                return False
            self._jobs.append(job)
            self._wake.notify()
            return True

    def finish(self) -> None:
        """End after what has been posted; from within a job."""
        self._stopping = True

    # --- for jobs only --------------------------------------------------------------------------

    def make_room(self, most: int) -> int:
        """Wait until one more submission may be in flight, of `most`; how many there are with it."""
        while len(self._flight) >= most:
            self._fence()
        return len(self._flight) + 1

    def launched(self, submission: Any, started: float, fenced: Fence) -> None:
        """A submission was made; `fenced(seconds, error)` is called once it has finished, or cannot be waited for.

        `fenced` must not raise.
        """
        self._flight.append((submission, started, fenced))

    def drain(self) -> None:
        """Wait until nothing is in flight."""
        while self._flight:
            self._fence()

    def _fence(self) -> None:
        submission, started, fenced = self._flight.popleft()
        assert self.wait_for is not None
        error: BaseException | None = None
        try:
            self.wait_for(submission)
        except BaseException as caught:
            error = caught
        now = time.perf_counter()
        seconds = now - max(started, self._last_fence)
        self._last_fence = now
        fenced(seconds, error)

    def _run(self) -> None:
        while True:
            with self._wake:
                if not self._jobs and not self._flight:
                    if self._stopping:
                        return
                    self._wake.wait_for(lambda: self._jobs or self._stopping)
                job = self._jobs.popleft() if self._jobs else None
            if job is not None:
                job()
            elif self._flight:
                self._fence()
