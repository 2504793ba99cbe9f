"""Metrics for Prometheus, whose names begin with `stree_jax_`."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stree_jax.server.engine import Engine
from stree_jax.speculation.draft import ORIGINS

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class EngineFigures(Collector):
    """The counters of the engine, read when metrics are requested."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, counts = self.engine, self.engine.counts
        prefixes = engine.batch.prefixes
        for name, text, value in (
            ("queue_length", "Texts that wait for a row.", engine.waiting),
            ("rows_running", "Rows that are decoding a text.", engine.running),
            ("rows", "Rows of the batch.", engine.batch.sizes.rows),
            ("prefixes", "Cached states.", len(prefixes)),
            ("prefix_bytes", "Bytes of cached prefixes.", prefixes.bytes),
            (
                "tokens_per_second",
                "Generated tokens per second, over the last ten seconds.",
                counts.tokens_per_s(),
            ),
            (
                "tau",
                "Acceptance length: tokens per target pass and row, since the start.",
                counts.tokens / max(counts.calls, 1),
            ),
        ):
            yield GaugeMetricFamily(f"stree_jax_{name}", text, value=value)
        for name, text, value in (
            ("tokens", "Generated tokens.", counts.tokens),
            ("target_calls", "Target passes, summed over rows.", counts.calls),
            ("segments", "Segments of the decoding loop.", counts.segments),
            ("failures", "Failed segments.", counts.failures),
            ("prefix_hits", "Prompts with a cached prefix.", prefixes.hits),
            ("prefix_tokens", "Prompt tokens in cached prefixes.", prefixes.tokens),
        ):
            yield CounterMetricFamily(f"stree_jax_{name}", text, value=value)
        by = CounterMetricFamily(
            "stree_jax_tokens_by_origin",
            "Generated tokens by source.",
            labels=["origin"],
        )
        for origin, count in zip(ORIGINS, counts.by_origin.tolist(), strict=True):
            by.add_metric([origin], count)
        yield by


class Metrics:
    """Counters of requests, and their latencies."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineFigures(engine))
        self.requests = Counter(
            "stree_jax_requests",
            "Requests for text by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "stree_jax_prompt_tokens",
            "Tokens of the prompts of accepted requests.",
            registry=self.registry,
        )
        seconds = self._seconds
        self.request_seconds = seconds("request", "Time to the end of the answer.")
        self.first_token_seconds = seconds("first_token", "Time to the first token.")
        self.queue_seconds = seconds("queue", "Time to the assignment of a row.")
        self.prefill_seconds = seconds("prefill", "Time of the prefill of the prompts.")
        self.decode_seconds = seconds("decode", "Time from the prefill to the end.")
        per_token = "Time per token of an answer, after its first piece."
        self.token_seconds = seconds("token", per_token, TOKEN_SECONDS)

    def _seconds(
        self, name: str, text: str, buckets: tuple[float, ...] = SECONDS
    ) -> Histogram:
        return Histogram(
            f"stree_jax_{name}_seconds", text, buckets=buckets, registry=self.registry
        )

    def ended(self, outcome: str) -> None:
        """Counts a request by its outcome."""
        self.requests.labels(outcome).inc()

    def text(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class Watch:
    """A clock for the latencies of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics, self.began = metrics, time.monotonic()
        self.first: float | None = None
        self.later = 0  # tokens after the first piece

    def piece(self, tokens: int) -> None:
        """Notes that a piece of the answer with a number of tokens is ready."""
        now = time.monotonic()
        if self.first is not None:
            self.later += tokens
        elif tokens:
            self.first = now
            self.metrics.first_token_seconds.observe(now - self.began)

    def end(self, outcome: str) -> None:
        """Counts the request, and its latencies if the outcome is "ok"."""
        now = time.monotonic()
        self.metrics.ended(outcome)
        if outcome != "ok":
            return
        self.metrics.request_seconds.observe(now - self.began)
        if self.first is not None and self.later:
            self.metrics.token_seconds.observe((now - self.first) / self.later)
