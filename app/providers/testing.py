"""Containers with parts swapped, for tests and for CI without an accelerator.

    with overridden(ServerArgs(...), fake=True) as container:
        scheduler = container.scheduler()

Each call builds a container of its own, so the swapped parts reach the runtime and the caches alike and nothing of them
is left afterwards. Overriding a provider of a container that was used already would leave its built parts as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dependency_injector import providers
from jax.sharding import Mesh

from app.caches.registry import CacheTypeRegistry, default_registry
from app.config.model_config import ModelConfig
from app.config.server_args import ServerArgs
from app.containers import Container, build_container
from app.core.ports import ModelRunner, PoolSpec
from app.errors import ConfigError
from app.hicache.identities import FAKE_WEIGHTS
from app.providers.tiers import identities
from app.text.byte_tokenizer import ByteDetokenizer, ByteTokenizer
from app.tpu.cpu_fake import FakeDevicePool, FakeModelRunner, fake_model_config
from app.tpu.failing_runner import FailingRunner, InjectedFailure
from app.tpu.hybrid_fake import FakeHybridPool, HybridFakeRunner
from app.tpu.hybrid_layout import HybridSpec

Override = Callable[[Container], providers.Provider[object]]
"""Makes the provider that replaces another; it may refer to the container's other providers."""


def fake_device_pool(container: Container) -> providers.Provider[object]:
    """A device pool that enforces donation, for `overridden(args, device_pool=fake_device_pool)`."""
    return providers.ThreadSafeSingleton(
        _fake_pool, container.pool_spec, container.hybrid_spec, container.mesh, container.model_config
    )


def _fake_pool(
    spec: PoolSpec, hybrid_spec: HybridSpec, mesh: Mesh, model: ModelConfig
) -> FakeDevicePool | FakeHybridPool:
    return FakeHybridPool(spec, hybrid_spec, mesh) if model.is_hybrid else FakeDevicePool(spec, mesh)


def _fake_runner(config: ModelConfig) -> ModelRunner:
    if config.is_hybrid:
        return HybridFakeRunner(config.vocab_size, config.sliding_window)
    return FakeModelRunner(config.vocab_size)


def failing_runner(failure: InjectedFailure) -> Override:
    """The fake model of whatever kind is served, on a device that fails once."""
    return lambda container: providers.ThreadSafeSingleton(_failing_runner, container.base_model_config, failure)


def _failing_runner(config: ModelConfig, failure: InjectedFailure) -> ModelRunner:
    return FailingRunner(_fake_runner(config), failure)


def fake_model(model: ModelConfig | None = None) -> dict[str, Override]:
    """Overrides that need no model file: the fake pool, the hashing model, and a tokenizer of bytes."""
    config = model or fake_model_config()
    return {
        "base_model_config": lambda _: providers.Object(config),
        "device_pool": fake_device_pool,
        "model_runner": lambda _: providers.ThreadSafeSingleton(_fake_runner, config),
        "tokenizer": lambda _: providers.ThreadSafeSingleton(ByteTokenizer, config.vocab_size),
        "detokenizer": lambda _: providers.ThreadSafeSingleton(ByteDetokenizer),
        "storage_ids": _identities_of_fakes,
    }


def _identities_of_fakes(container: Container) -> providers.Provider[object]:
    """Without a checkpoint, which there is none of."""
    model, specs, carriers = container.base_model_config, container.specs, container.page_carriers
    return providers.ThreadSafeSingleton(
        identities, FAKE_WEIGHTS, model, container.dtype, specs, container.tp_size, carriers
    )


@contextmanager
def overridden(
    args: ServerArgs,
    *,
    fake: bool = False,
    model: ModelConfig | None = None,
    registry: CacheTypeRegistry = default_registry,
    **overrides: Override,
) -> Iterator[Container]:
    """A fresh container with providers replaced by name; its runtime is shut down when the block is left.

    fake: swap the device pool, the model and the tokenizer for fakes that need no file; `model` shapes the fake.
    An unknown provider name is refused with ConfigError.
    """
    container = build_container(args, registry)
    replaced = {**(fake_model(model) if fake else {}), **overrides}
    for name, override in replaced.items():
        if name not in container.providers:
            raise ConfigError(field="override", value=name, allowed=f"a provider: {', '.join(container.providers)}")
        container.providers[name].override(override(container))
    try:
        yield container
    finally:
        container.shutdown_resources()
        container.lifecycle().close()
