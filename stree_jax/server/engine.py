"""The thread that owns the device, and the queue in front of it.

Between two segments of the loop it frees the rows of texts that ended or that nobody
wants any more, and gives them to those that wait, first come, first served.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from stree_jax.server.batch import Asked, Batch, News
from stree_jax.server.texts import Piece, Writer
from stree_jax.speculation.draft import ORIGINS

log = logging.getLogger(__name__)

MOST_FAILURES = 3  # in a row, without a segment that went well
WINDOW_S = 10.0  # over which tokens a second are counted


class QueueFull(Exception):
    """There is no room for so many texts more."""


class Closed(Exception):
    """The engine takes no texts any more."""


@dataclass(frozen=True)
class Failed:
    """A text that will not be finished, and why."""

    reason: str


@dataclass(eq=False)
class Job:
    """A text that somebody waits for.

    Attributes:
      asked: of the device.
      writer: of the text.
      tell: is called with every `Piece`, or with `Failed`, in the engine's thread; it
        must neither wait nor raise.
      cancelled: nobody wants it any more.
      queued: when it came, by `time.monotonic`.
      began: when it got a row.
    """

    asked: Asked
    writer: Writer
    tell: Callable[[Piece | Failed], None]
    cancelled: bool = False
    queued: float = field(default_factory=time.monotonic)
    began: float | None = None


@dataclass
class Counts:
    """What the engine has done so far; written by its thread, read by others."""

    tokens: int = 0
    calls: int = 0
    segments: int = 0
    failures: int = 0
    by_origin: np.ndarray = field(
        default_factory=lambda: np.zeros(len(ORIGINS), np.int64)
    )
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=4096))

    def add(self, news: Sequence[News]) -> None:
        tokens = sum(len(new.tokens) for new in news)
        self.tokens += tokens
        self.calls += sum(new.calls for new in news)
        self.segments += 1
        for new in news:
            self.by_origin += np.bincount(new.origins, minlength=len(ORIGINS))
        self.recent.append((time.monotonic(), tokens))

    def tokens_per_s(self) -> float:
        since = time.monotonic() - WINDOW_S
        return sum(n for at, n in tuple(self.recent) if at >= since) / WINDOW_S


class Engine:
    """Texts in, pieces out. All methods may be called from any thread."""

    def __init__(
        self,
        batch: Batch,
        queue: int = 64,
        on_death: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Args:
        queue: most texts that wait for a row.
        on_death: is told once why no text will be made any more.
        """
        self.batch, self.most, self.on_death = batch, queue, on_death
        self.counts = Counts()
        self.dead: str | None = None
        self._waiting: deque[Job] = deque()
        self._held: dict[int, Job] = {}  # by row; of the thread alone
        self._wake = threading.Condition()
        self.closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._held)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all of them, or none.

        Raises:
          QueueFull: more than fit.
          Closed: the engine is shutting down, or has failed.
        """
        with self._wake:
            if self.closing or self.dead is not None:
                raise Closed(self.dead or "the server is shutting down")
            if len(self._waiting) + len(jobs) > self.most:
                raise QueueFull
            self._waiting.extend(jobs)
            self._wake.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Their rows are free after the segment that is running."""
        with self._wake:
            for job in jobs:
                job.cancelled = True
            gone = [job for job in jobs if job in self._waiting]
            for job in gone:
                self._waiting.remove(job)

    def stop(self, wait_s: float = 60.0) -> bool:
        """End: what is not finished fails. Whether the thread has ended in time."""
        with self._wake:
            self.closing = True
            self._wake.notify()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        reason, failures = "the server is shutting down", 0
        try:
            while self._wait():
                try:
                    self._turn()
                    failures = 0
                except Exception as error:
                    failures += 1
                    self._recover(error)
                    if failures >= MOST_FAILURES:
                        raise
        except BaseException as error:
            reason = f"decoding failed: {_in_a_line(error)}"
            self.dead = reason
        finally:
            self._fail_all(reason)
            if self.dead is not None:
                self.on_death(self.dead)

    def _wait(self) -> bool:
        """Until there is something to do; False: to end."""
        with self._wake:
            while not (self._waiting or self._held or self.closing):
                self._wake.wait()
            return not self.closing

    def _turn(self) -> None:
        """Free rows, give them away, and decode a segment."""
        gone = [row for row, job in self._held.items() if job.cancelled]
        if gone:
            self.batch.cancel(gone)
            for row in gone:
                del self._held[row]
        for row in self.batch.free_rows():
            job = self._next()
            if job is None:
                break
            self._held[row] = job  # from here on its failure is told
            job.began = time.monotonic()
            self.batch.admit(row, job.asked)
        if not self._held:
            return
        news = self.batch.advance()
        self.counts.add(list(news.values()))
        for row, new in news.items():
            self._tell(row, new)

    def _next(self) -> Job | None:
        with self._wake:
            return self._waiting.popleft() if self._waiting else None

    def _tell(self, row: int, news: News) -> None:
        job = self._held[row]
        if job.cancelled:
            return  # the next turn frees the row
        try:
            piece = job.writer.write(news)
        except Exception as error:  # of one text: the batch is as it was
            log.error("a text failed: %s", _in_a_line(error))
            job.cancelled = True
            job.tell(Failed(f"the text could not be written: {_in_a_line(error)}"))
            return
        if self.batch.rows[row] is None:
            del self._held[row]
        elif piece.finish_reason is not None:
            job.cancelled = True  # ended by a stop string; its row goes on until then
        job.tell(piece)

    def _recover(self, error: Exception) -> None:
        """Whoever had a row has failed; a new batch is begun for those that wait."""
        self.counts.failures += 1
        log.error("decoding failed, its texts are lost: %s", _in_a_line(error))
        held, self._held = list(self._held.values()), {}
        for job in held:
            job.tell(Failed(f"decoding failed: {_in_a_line(error)}"))
        self.batch.clear()

    def _fail_all(self, reason: str) -> None:
        with self._wake:
            left = [*self._held.values(), *self._waiting]
            self._waiting.clear()
        self._held = {}
        for job in left:
            job.tell(Failed(reason))


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
