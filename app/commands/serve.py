"""`tpukv serve`: an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.commands.engine import announce_settings, open_container
from app.commands.nodes.joining import refuse_several_nodes
from app.commands.progress import progress_bar
from app.config.http_args import HttpArgs
from app.config.server_args import ServerArgs

if TYPE_CHECKING:
    from app.containers import Container
    from app.server.assembly import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArgs:
    """Serve the model over HTTP, as OpenAI's API; a page at / shows what the cache does. Ctrl-C ends it."""

    http: HttpArgs = field(default_factory=HttpArgs)
    """The server. Each of these can also come from the environment, as TPUKV_PORT and so on."""

    server: ServerArgs = field(default_factory=ServerArgs)
    """The engine. Each of these can also come from the environment, as TPUKV_PAGE_SIZE and so on."""


def run(args: ServeArgs) -> int:
    """Addresses are taken first, so that a port in use is found out before a model is loaded."""
    from app.server.assembly import assemble
    from app.server.kv_event_publisher import opened_publisher
    from app.server.run import listen, run

    refuse_several_nodes(args.server, "tpukv serve")
    parts: list[Parts] = []

    def prepare(container: Container) -> None:
        parts.append(assemble(container, args.http.served_model_name, publisher))
        announce_settings(container)

    with (
        listen(args.http.host, args.http.port) as listening,
        opened_publisher(args.http.kv_events_config, args.server.page_size) as publisher,
        open_container(args.server, prepare),
    ):
        [assembled] = parts
        with contextlib.ExitStack() as waiting:
            told = waiting.enter_context(progress_bar())

            def ready(url: str) -> None:
                waiting.close()
                print(_ready(url, assembled, args.http), flush=True)

            return run(assembled, args.http, listening, ready, told)


def _ready(url: str, parts: Parts, args: HttpArgs) -> str:
    """One line, with a command that can be pasted."""
    message = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": parts.served.model, "max_tokens": 32, "temperature": 0, "messages": [message]})
    key = "" if args.api_key is None else ' -H "Authorization: Bearer $TPUKV_API_KEY"'
    curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    return f"tpukv: ready: {parts.served.model} at {url} (a page there shows the cache); try: {curl}"
