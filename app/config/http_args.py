"""The settings of the HTTP server. Frozen; the command line's flags are generated from these fields."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field

from app.config.kv_events_config import parse_kv_events_config
from app.config.server_args import flag_of
from app.errors import CacheTypeConflictError, ConfigError

MAX_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpArgs:
    """How the engine is served. A value that cannot be served raises ConfigError, which names the flag."""

    host: str = "127.0.0.1"
    """Address to listen on; one that other machines reach needs --api-key."""

    port: int = 30000
    """Port to listen on; 0 takes any that is free."""

    served_model_name: str | None = None
    """Name by which clients ask for the model; by default that of its file or folder."""

    api_key: str | None = field(default=None, repr=False)
    """Key that every client must send, as `Authorization: Bearer KEY`."""

    admin_api_key: str | None = field(default=None, repr=False)
    """Key for flushing the cache, aborting requests and looking into the cache; by default --api-key."""

    open_to_network: bool = False
    """Allow an address that other machines reach without --api-key: anyone who reaches it is served."""

    max_queued_requests: int = 256
    """Most requests that wait beside those that run; more are refused with status 429."""

    queue_timeout: float = 300.0
    """Seconds after which a request that still waits to be started is refused with status 503."""

    max_body_bytes: int = 16 * 2**20
    """Largest request body; a larger one is refused with status 413."""

    body_timeout: float = 30.0
    """Seconds that a client has to send a request's body."""

    shutdown_timeout: float = 20.0
    """Seconds that running requests have to finish at shutdown; then they are ended, with a reply."""

    kv_events_config: str = ""
    """Where routers hear what each cache tier holds: a JSON object; by default nowhere. Prompts can be read there."""

    def __post_init__(self) -> None:
        limits: tuple[tuple[str, Callable[[], bool], str], ...] = (
            ("host", lambda: bool(self.host.strip()), "an address or host name"),
            ("port", lambda: 0 <= self.port <= MAX_PORT, f"0 to {MAX_PORT}"),
            ("served_model_name", lambda: self.served_model_name != "", "a name of at least one character"),
            ("max_queued_requests", lambda: self.max_queued_requests >= 0, "0 or more"),
            ("queue_timeout", lambda: 0 < self.queue_timeout < 1e6, "more than 0 seconds"),
            ("max_body_bytes", lambda: 1024 <= self.max_body_bytes <= 2**31 - 1, "1024 bytes to 2 GiB"),
            ("body_timeout", lambda: 0 < self.body_timeout < 1e6, "more than 0 seconds"),
            ("shutdown_timeout", lambda: 0 <= self.shutdown_timeout < 1e6, "0 seconds or more"),
        )
        for name, good, allowed in limits:
            if not good():
                raise ConfigError(field=flag_of(name), value=getattr(self, name), allowed=allowed)
        for name, key in (("api_key", self.api_key), ("admin_api_key", self.admin_api_key)):
            # The key itself is never shown.
            if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key and key):
                raise ConfigError(field=flag_of(name), value="***", allowed="printable ASCII without spaces around it")
        parse_kv_events_config(self.kv_events_config)
        if not (self.is_loopback or self.api_key or self.open_to_network):
            raise CacheTypeConflictError(
                field="--host",
                value=self.host,
                other_field="--api-key",
                other_value=None,
                allowed="other machines may reach this address; give a key, or --open-to-network to serve anyone",
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches `host`."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a name or address, without its port, is this machine's own and nobody else's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
