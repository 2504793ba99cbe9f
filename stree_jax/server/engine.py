"""The engine of the server: the thread that uses the device, and its queue of requests.

It calls the compiled decoding loop again and again. One call is a segment: a fixed
number of decoding steps of all rows (`batch.Sizes.steps`). Between two segments the
engine frees the rows of finished and cancelled texts, and assigns free rows to waiting
texts: those of API keys with fewer rows first, else in the order of their arrival. A
long prompt is prefilled in pieces between segments, so that it does not stop the texts
of other rows.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from stree_jax.common.heap import return_free_memory
from stree_jax.server.batch import Batch
from stree_jax.server.rows import RowUpdate, TextRequest
from stree_jax.server.texts import Piece, Writer
from stree_jax.speculation.draft import ORIGINS

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # successive failed segments before the engine stops
# Seconds without work after which the rows' memory is returned. The next request then
# waits for it: 0.3 to 0.5 s of CPU time for four rows of SmolLM2-135M (430 MB).
REST_S = 60.0
WINDOW_S = 10.0  # seconds over which tokens per second are averaged


class QueueFull(Exception):
    """The queue has too little space for the texts of a request."""


class Closed(Exception):
    """The engine does not accept texts any more."""


@dataclass(frozen=True)
class Failed:
    """The end of a text that failed.

    Attributes:
      reason: why it failed.
    """

    reason: str


@dataclass(eq=False)
class Job:
    """A text in the queue or in the batch.

    Attributes:
      request: the request for the text.
      writer: converts the row's tokens into text.
      send: called with every `Piece`, or with `Failed`, in the engine's thread. It must
        neither block nor raise.
      cancelled: True if the text is not needed any more.
      queued: time of arrival, by `time.monotonic`.
      began: time at which a row was assigned, or None.
      prefilled: time at which the prompt was prefilled.
      ended: time of the last piece.
      cached: number of prompt tokens that were not prefilled.
      calls: number of target passes so far.
    """

    request: TextRequest
    writer: Writer
    send: Callable[[Piece | Failed], None]
    cancelled: bool = False
    queued: float = field(default_factory=time.monotonic)
    began: float | None = None
    prefilled: float = 0.0
    ended: float = 0.0
    cached: int = 0
    calls: int = 0


@dataclass
class Counts:
    """Counters of the engine. Its thread writes them, other threads read them.

    Attributes:
      tokens: generated tokens.
      calls: target passes, summed over rows.
      segments: number of segments (calls of the decoding loop).
      failures: number of failed segments.
      by_origin: number of generated tokens by source, see `draft.ORIGINS`.
      recent: the time at which each recent segment ended, and its number of tokens.
    """

    tokens: int = 0
    calls: int = 0
    segments: int = 0
    failures: int = 0
    by_origin: np.ndarray = field(
        default_factory=lambda: np.zeros(len(ORIGINS), np.int64)
    )
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=4096))

    def add(self, updates: Sequence[RowUpdate]) -> None:
        """Adds the results of a segment to the counters."""
        tokens = sum(len(update.tokens) for update in updates)
        self.tokens += tokens
        self.calls += sum(update.calls for update in updates)
        self.segments += 1
        for update in updates:
            self.by_origin += np.bincount(update.origins, minlength=len(ORIGINS))
        self.recent.append((time.monotonic(), tokens))

    def tokens_per_s(self) -> float:
        """Returns the mean tokens per second over the last `WINDOW_S` seconds."""
        since = time.monotonic() - WINDOW_S
        return sum(n for at, n in tuple(self.recent) if at >= since) / WINDOW_S


class Engine:
    """A thread that runs requests for texts and sends back pieces of them. All methods
    may be called from any thread."""

    def __init__(self, batch: Batch, queue: int = 64) -> None:
        """Makes an engine whose thread is not started yet; `start` does that.

        Args:
          batch: the batch, after `programs.warm`.
          queue: maximum number of texts that wait for a row.
        """
        self.batch, self.max_waiting = batch, queue
        # Called once, with the reason, if the engine stops after failures.
        self.on_death: Callable[[str], None] = lambda reason: None
        self.counts = Counts()
        self.dead: str | None = None
        self._waiting: deque[Job] = deque()
        # The running jobs by batch row; only the engine's thread uses it.
        self._held: dict[int, Job] = {}
        # The row whose prompt is being prefilled, and what does that piece by piece.
        self._reading: tuple[int, Generator[int, None, int]] | None = None
        self._wake = threading.Condition()
        self.closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of texts that wait for a row."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of texts that have a row."""
        return len(self._held)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Adds all of the jobs to the queue, or none.

        Each API key has the queue's space for itself.

        Raises:
          QueueFull: the queue has too little space.
          Closed: the engine is shutting down, or has failed.
        """
        with self._wake:
            if self.closing or self.dead is not None:
                raise Closed(self.dead or "the server is shutting down")
            owners = {job.request.owner for job in jobs}
            own = sum(job.request.owner in owners for job in self._waiting)
            if own + len(jobs) > self.max_waiting:
                raise QueueFull
            self._waiting.extend(jobs)
            self._wake.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Cancels jobs. Their rows become free after the segment that is running."""
        with self._wake:
            for job in jobs:
                job.cancelled = True
            waiting = [job for job in jobs if job in self._waiting]
            for job in waiting:
                self._waiting.remove(job)

    def stop(self, wait_s: float = 60.0) -> bool:
        """Stops the engine; unfinished texts fail. Returns True if the thread has ended
        within `wait_s` seconds."""
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
                    if failures >= MAX_FAILURES:
                        raise
        except BaseException as error:
            reason = f"decoding failed: {_one_line(error)}"
            self.dead = reason
        finally:
            self._fail_all(reason)
            if self.dead is not None:
                self.on_death(self.dead)

    def _wait(self) -> bool:
        """Waits until there is work. Returns False if the engine must stop."""
        if not self._work_within(REST_S):
            self._rest()
            self._work_within(None)
        return not self.closing

    def _work_within(self, seconds: float | None) -> bool:
        """Waits for work. Returns False if no work comes in time."""
        with self._wake:
            return self._wake.wait_for(
                lambda: bool(self._waiting or self._held or self.closing), seconds
            )

    def _rest(self) -> None:
        """Frees the arrays of the rows and returns their memory to the operating
        system. Does so only on CPUs, because a GPU's memory stays reserved for the
        process."""
        if jax.default_backend() == "cpu":
            self.batch.rest()
            return_free_memory()

    def _turn(self) -> None:
        """Frees the rows of cancelled texts, assigns free rows to waiting texts, and
        runs a segment of decoding steps."""
        self._free_cancelled()
        self._admit()
        if not self.batch.decoding:
            return
        updates = self.batch.advance()
        self.counts.add(list(updates.values()))
        for row, update in updates.items():
            self._send(row, update)

    def _free_cancelled(self) -> None:
        """Frees the rows of cancelled texts."""
        cancelled = [row for row, job in self._held.items() if job.cancelled]
        if self._reading is not None and self._reading[0] in cancelled:
            row, self._reading = self._reading[0], None
            cancelled.remove(row)
            del self._held[row]
        if cancelled:
            self.batch.cancel(cancelled)
            for row in cancelled:
                del self._held[row]

    def _admit(self) -> None:
        """Assigns free rows to waiting texts, whose prompts are prefilled first. It
        prefills about `Batch.piece` tokens; the next turn goes on. In between, other
        rows are decoded, and a cancelled text or `stop` ends the prefill."""
        read = 0
        while self._reading is not None or self._begin():
            assert self._reading is not None  # set by `_begin`
            row, pieces = self._reading
            try:
                read += next(pieces)
            except StopIteration as end:
                job, self._reading = self._held[row], None
                job.cached, job.prefilled = end.value, time.monotonic()
                read += min(len(job.request.ids) - job.cached, self.batch.piece)
            if read >= self.batch.piece:
                return

    def _begin(self) -> bool:
        """Begins to prefill the next waiting prompt. Returns False if there is none, or
        no free row."""
        free = self.batch.free_rows()
        job = self._next() if free else None
        if job is None:
            return False
        self._held[free[0]] = job  # from here on, `_recover` reports its failure
        job.began = time.monotonic()
        self._reading = free[0], self.batch.admission(free[0], job.request)
        return True

    def _next(self) -> Job | None:
        """Returns the next job of the queue, or None if it is empty: the first one of
        an API key that has the fewest rows."""
        with self._wake:
            if not self._waiting:
                return None
            rows = Counter(job.request.owner for job in self._held.values())
            job = min(self._waiting, key=lambda job: rows[job.request.owner])
            self._waiting.remove(job)
            return job

    def _send(self, row: int, update: RowUpdate) -> None:
        """Sends the new piece of a row's text."""
        job = self._held[row]
        if job.cancelled:
            return  # the next turn frees the row
        try:
            piece = job.writer.write(update)
        except Exception as error:  # concerns this text only, not the batch
            log.error("a text failed: %s", _one_line(error))
            job.cancelled = True
            job.send(Failed(f"the text could not be written: {_one_line(error)}"))
            return
        if self.batch.rows[row] is None:
            del self._held[row]
        elif piece.finish_reason is not None:
            job.cancelled = True  # a stop string was found; the next turn frees the row
        job.calls += update.calls
        job.ended = time.monotonic()
        job.send(piece)

    def _recover(self, error: Exception) -> None:
        """Fails all jobs that have a row, and clears the batch for waiting jobs."""
        self.counts.failures += 1
        log.error("decoding failed, its texts are lost: %s", _one_line(error))
        held, self._held, self._reading = list(self._held.values()), {}, None
        for job in held:
            job.send(Failed(f"decoding failed: {_one_line(error)}"))
        self.batch.clear()

    def _fail_all(self, reason: str) -> None:
        """Fails all jobs."""
        with self._wake:
            left = [*self._held.values(), *self._waiting]
            self._waiting.clear()
        self._held = {}
        for job in left:
            job.send(Failed(reason))


def _one_line(error: BaseException) -> str:
    """Returns an error's message as one line of limited length."""
    return " ".join(str(error).split())[:300] or type(error).__name__
