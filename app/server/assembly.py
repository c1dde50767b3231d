"""A server's parts from a container."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath

from dependency_injector import providers
from starlette.applications import Starlette

from app.config.http_args import HttpArgs
from app.containers import Container
from app.core.ports import Tokenizer
from app.models.bundled import BUNDLED_MODEL_NAME
from app.observability.cache_journal import CacheJournal
from app.observability.kv_events import Medium
from app.observability.metrics import Metrics
from app.providers.report import engine_facts
from app.providers.tiers import seed_of
from app.providers.warmup import level_of_server, warm_up
from app.scheduler_adapter import SchedulerAdapter
from app.scheduling.scheduler import Scheduler
from app.server.admin_routes import AdminRoutes
from app.server.asgi import make_app
from app.server.cache_state import CacheSnapshot, RunningView, host_use, snapshot_of
from app.server.engine_loop import EngineLoop
from app.server.engine_watch import EngineWatch
from app.server.gate import Gate
from app.server.generation import Generation
from app.server.health_routes import HealthRoutes
from app.server.http_body import BodyReader
from app.server.kv_event_publisher import KvEventPublisher
from app.server.served import Served
from app.server.served_tiers import ServedTiers, TierParts
from app.server.storage_routes import StorageRoutes
from app.server.texts import Texts
from app.server.token_routes import TokenRoutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a server needs of an engine. The scheduler reports to `watch`."""

    served: Served
    tokenizer: Tokenizer
    scheduler: Scheduler
    adapter: SchedulerAdapter
    watch: EngineWatch
    metrics: Metrics
    journal: CacheJournal
    tiers: TierParts | None
    publish: Callable[[], None]  # KV events, if anybody wants them
    warm_up: Callable[[], Iterator[tuple[str, float]]]  # on the engine's thread, a step each time it goes on

    def make_app(self, engine: EngineLoop, args: HttpArgs, version: str) -> tuple[Gate, Texts, Starlette]:
        gate = Gate(engine, max_running=self.served.limits.max_running_requests, max_queued=args.max_queued_requests)
        texts = Texts(self.tokenizer)
        bodies = BodyReader(texts, max_bytes=args.max_body_bytes, timeout_s=args.body_timeout)
        tiers = None if self.tiers is None else ServedTiers(engine, self.tiers)
        if tiers is not None:
            self.metrics.expose(tiers.collector)
        app = make_app(
            args=args,
            version=version,
            metrics=self.metrics,
            generation=Generation(
                engine=engine,
                served=self.served,
                tokenizer=self.tokenizer,
                texts=texts,
                bodies=bodies,
                gate=gate,
                metrics=self.metrics,
            ),
            tokens=TokenRoutes(served=self.served, texts=texts, bodies=bodies),
            admin=AdminRoutes(
                engine=engine,
                scheduler=self.scheduler,
                watch=self.watch,
                served=self.served,
                bodies=bodies,
                texts=texts,
                snapshot=self._snapshot,
                tiers=tiers,
            ),
            health=HealthRoutes(engine=engine, watch=self.watch, gate=gate, metrics=self.metrics, tiers=tiers),
            storage=StorageRoutes(tiers=tiers, bodies=bodies),
        )
        return gate, texts, app

    def _snapshot(self) -> CacheSnapshot:
        """For the page. On the engine's thread."""
        requests = [
            RunningView(
                request_id=each.request_id,
                status=each.status,
                prompt_tokens=each.prompt_tokens,
                cached_tokens=each.cached_tokens or 0,
                output_tokens=each.output_tokens,
                age_s=each.age_s,
            )
            for each in self.scheduler.progress()
        ]
        host = None if self.tiers is None else host_use(self.tiers.control.counters())
        return snapshot_of(self.adapter, self.journal, requests, host)


def assemble(
    container: Container, served_model_name: str | None = None, publisher: KvEventPublisher | None = None
) -> Parts:
    """Loads the model and opens the runtime, with a watch on its scheduler. On a container whose scheduler is not
    built yet.

    publisher: of the caches' KV events; None for none.
    """
    facts = engine_facts(container)
    served = Served(
        model=served_model_name or _model_name(container.server_args().model_path),
        created=int(time.time()),
        limits=container.scheduler_limits(),
        pool_tokens=facts["pool_tokens"],
        facts=facts,
    )
    metrics = Metrics(
        {"model_name": served.model, "cache_type": facts["cache_type"], "page_size": str(facts["page_size"])}
    )
    journal = CacheJournal(time.monotonic)
    container.eviction_observer.override(providers.Object(journal))
    if publisher is not None:
        metrics.expose(publisher)
        for provider, medium in _tiers_that_tell(container):
            provider.override(providers.Object(publisher.outbox.sink(medium)))
    watch = EngineWatch(cache=container.tree_cache(), metrics=metrics, journal=journal)
    container.observer.override(providers.Object(watch))
    level = level_of_server(container.server_args().warmup, container.platform())
    return Parts(
        served=served,
        tokenizer=container.tokenizer(),
        scheduler=container.scheduler(),
        adapter=container.scheduler_adapter(),
        watch=watch,
        metrics=metrics,
        journal=journal,
        tiers=_tier_parts(container),
        publish=_publish_nothing if publisher is None else publisher.publish,
        warm_up=partial(warm_up, container.runtime(), level, served.limits, container.tree_cache().tiers),
    )


def _tiers_that_tell(container: Container) -> tuple[tuple[providers.Provider[object], Medium], ...]:
    return (container.events, "device"), (container.host_events, "host"), (container.storage_events, "storage")


def _publish_nothing() -> None:
    """Nobody listens, and nothing is noted down."""


def _tier_parts(container: Container) -> TierParts | None:
    """None without --enable-hierarchical-cache."""
    mover, lane = container.tier_mover(), container.storage_lane()
    if mover is None or lane is None:
        return None
    return TierParts(
        args=container.server_args(),
        page_size=container.server_args().page_size,
        control=container.tree_cache().tiers,
        mover=mover,
        lane=lane,
        storage=container.storage(),
        seed=seed_of(container.storage_ids()),
    )


def _model_name(model_path: str) -> str:
    return PurePath(model_path).name.removesuffix(".gguf") or BUNDLED_MODEL_NAME
