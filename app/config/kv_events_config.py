"""Where the server publishes KV events: the value of --kv-events-config, with the fields that routers' users know."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from app.errors import ConfigError

FLAG = "--kv-events-config"

_Count = Annotated[int, msgspec.Meta(ge=1, le=10**7)]
_Address = Annotated[str, msgspec.Meta(min_length=1)]


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """endpoint: of the socket that publishes; it binds to `*`, to a loopback address and to ipc://, and connects to
        any other.
    replay_endpoint: of the socket that sends again what was published; it always binds. None for none.
    buffer_steps: messages that can be sent again.
    hwm: messages that wait for one slow subscriber; what is more is lost to it.
    max_queue_size: messages that wait to be published.
    topic: with which every message begins.
    """

    publisher: Literal["null", "zmq"] = "zmq"
    enable_kv_cache_events: bool = True
    endpoint: _Address = "tcp://127.0.0.1:5557"
    replay_endpoint: _Address | None = None
    buffer_steps: _Count = 10_000
    hwm: _Count = 100_000
    max_queue_size: _Count = 100_000
    topic: str = ""

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


def parse_kv_events_config(text: str) -> KvEventsConfig | None:
    """The settings in the flag's value; None where nothing is published. ConfigError for anything else."""
    if not text.strip():
        return None
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except msgspec.DecodeError as error:
        fields = ", ".join(KvEventsConfig.__struct_fields__)
        raise ConfigError(field=FLAG, value=text, allowed=f"a JSON object of {fields} ({error})") from error
    return config if config.is_on else None
