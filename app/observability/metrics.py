"""What Prometheus sees. Names are those of vLLM and SGLang where they have one, with the prefix `tpukv:`.

Counters of tokens add up to the usage of the replies: neither a retraction nor a chunk changes them.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
SOURCES = ("device", "host", "storage")

_WAITS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
_BETWEEN_TOKENS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 40)
_WHOLE_REQUESTS = (0.1, 0.3, 0.5, 1, 2, 5, 10, 20, 40, 60, 120, 240, 480, 960, 1920)
_STEPS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_TOKENS = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Metrics:
    """The figures of one server, in a registry of its own. Safe from any thread."""

    def __init__(self, facts: Mapping[str, str]) -> None:
        """`facts`: what stays the same (model, cache type, page size), as labels of tpukv:cache_config_info."""
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tpukv:{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"tpukv:{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"tpukv:{name}", text, labels, buckets=buckets, registry=registry)

        Info("tpukv:cache_config", "What is served, and how.", registry=registry).info(dict(facts))
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of started requests")
        self._generation_tokens = counter("generation_tokens", "Output tokens")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the cache")
        self._hits = counter("prefix_cache_hits", "Prompt tokens that were cached")
        self._cached = counter("cached_tokens", "Prompt tokens that were cached, by tier", "cache_source")
        self._evicted = counter("evicted_tokens", "Cached tokens evicted to make room")
        self._retractions = counter("num_preemptions", "Running requests put back into the queue")
        self._ended = counter("request_success", "Requests that ended, by how", "finished_reason")
        self._refused = counter("requests_refused", "Requests answered with an error, by its code", "code")

        self._running = gauge("num_requests_running", "Requests that have a row")
        self._waiting = gauge("num_requests_waiting", "Requests in the queue")
        self._hit_rate = gauge("cache_hit_rate", "Cached part of all prompt tokens since the start, 0 to 1")
        self._usage = gauge("kv_cache_usage_perc", "Part of the pool that holds tokens, cached or running, 0 to 1")
        self._used = gauge("num_used_tokens", "Tokens of pages that hold something")
        self._free = gauge("num_free_tokens", "Tokens of pages that nobody holds")
        self._evictable = gauge("num_evictable_tokens", "Tokens of cached pages that no request reads")
        self._pool = gauge("max_total_num_tokens", "Tokens that the pool holds")

        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token", _WAITS)
        self._between = histogram("inter_token_latency_seconds", "Between tokens of streamed requests", _BETWEEN_TOKENS)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the end", _WHOLE_REQUESTS)
        self._queued = histogram("request_queue_time_seconds", "From arrival to the first admission", _WAITS)
        self._prompts = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._outputs = histogram("request_generation_tokens", "Output tokens of a request", _TOKENS)
        steps = histogram("step_time_seconds", "Time of one step of the scheduler, by where it went", _STEPS, "phase")
        self._schedule = steps.labels("schedule")
        self._prepare = steps.labels("prepare")
        self._execute = steps.labels("execute")
        for source in SOURCES:
            self._cached.labels(source)  # so that the series is there from the start
        self._num_looked_up = self._num_cached = 0
        self._num_generated = self._num_evicted = self._num_retractions = 0

    def expose(self, collector: Collector) -> None:
        """Show its figures too."""
        self._registry.register(collector)

    def text(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self._registry)

    def admitted(self, *, prompt_tokens: int, cached_tokens: Mapping[str, int], queued_s: float) -> None:
        """A request was started; `cached_tokens` of its prompt, by the tier that had them, need not be computed."""
        num_cached = sum(cached_tokens.values())
        self._prompt_tokens.inc(prompt_tokens)
        self._queries.inc(prompt_tokens)
        self._hits.inc(num_cached)
        for source, num_tokens in cached_tokens.items():
            self._cached.labels(source).inc(num_tokens)
        self._num_looked_up += prompt_tokens
        self._num_cached += num_cached
        self._hit_rate.set(self._num_cached / self._num_looked_up)
        self._prompts.observe(prompt_tokens)
        self._queued.observe(queued_s)

    def token(self, seconds: float) -> None:
        """A streamed request got its next token, `seconds` after the one before."""
        self._between.observe(seconds)

    def ended(self, *, reason: str, output_tokens: int, first_token_s: float | None, e2e_s: float) -> None:
        self._ended.labels(reason).inc()
        self._outputs.observe(output_tokens)
        self._e2e.observe(e2e_s)
        if first_token_s is not None:
            self._first_token.observe(first_token_s)

    def refused(self, code: str) -> None:
        """A request was answered with an error."""
        self._refused.labels(code).inc()

    def stepped(self, *, schedule_s: float, prepare_s: float, execute_s: float) -> None:
        self._schedule.observe(schedule_s)
        self._prepare.observe(prepare_s)
        self._execute.observe(execute_s)

    def measured(
        self, *, running: int, waiting: int, generated_tokens: int, evicted_tokens: int, retractions: int
    ) -> None:
        """How things stand; the last three are totals since the start."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._generation_tokens.inc(generated_tokens - self._num_generated)
        self._evicted.inc(evicted_tokens - self._num_evicted)
        self._retractions.inc(retractions - self._num_retractions)
        self._num_generated, self._num_evicted, self._num_retractions = generated_tokens, evicted_tokens, retractions

    def filled(self, *, pool_tokens: int, free_tokens: int, evictable_tokens: int) -> None:
        """How full the pool is."""
        self._pool.set(pool_tokens)
        self._free.set(free_tokens)
        self._evictable.set(evictable_tokens)
        self._used.set(pool_tokens - free_tokens)
        self._usage.set((pool_tokens - free_tokens) / pool_tokens)
