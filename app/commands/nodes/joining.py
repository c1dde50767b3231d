"""This process as one node of an engine that runs on several.

Nothing of control is shared: every node runs the same scheduler over the same requests, plans the same steps, and
drives its own devices; inside a step the devices meet. So a node cannot go on without the others. When one is gone, or
its device failed, the rest end as well: at once, with one line on stderr and exit code 1.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

from app.config.server_args import ServerArgs
from app.errors import ConfigError, NodesFailedError

_JAX_HEARTBEAT_S = 60  # longer than our own watch takes: jax ends the process with a page of text
_FAILED = 1


@contextlib.contextmanager
def joined(args: ServerArgs) -> Iterator[None]:
    """Be one of --nnodes while the context lasts; nothing with one node. Before jax has started any backend.

    Waits for the others on entry, --dist-timeout at most, and on a regular way out. Raises ConfigError when they do not
    come or were given other settings. Inside, the process ends when another node does so irregularly.
    """
    if args.nnodes == 1:
        yield
        return
    with _native_output_on_stderr(), _watched(args):
        yield


def refuse_several_nodes(args: ServerArgs, command: str) -> None:
    """For a command that gives work to one process alone: the others would wait for it inside a step for ever."""
    if args.nnodes > 1:
        raise ConfigError(field="--nnodes", value=args.nnodes, allowed=f"1; {command} runs in one process for now")


@contextlib.contextmanager
def _watched(args: ServerArgs) -> Iterator[None]:
    from importlib.metadata import version

    from app.commands.nodes.meeting import meet
    from app.commands.nodes.watch import NodeWatch

    watch = NodeWatch(meet(args, version("tpukv")), _end_process)
    watch.start()
    try:
        import jax

        _start_jax(args)
        yield
        watch.leave()
        # Node 0's jax serves the others': it goes last.
        if args.node_rank == 0:
            watch.wait_until_closed()
        jax.distributed.shutdown()
    except NodesFailedError as failure:
        _end_process(str(failure))
    finally:
        watch.close()


def _start_jax(args: ServerArgs) -> None:
    import jax

    from app.commands.nodes.meeting import address_of

    host, port = address_of(args)
    coordinator = f"[{host}]:{port + 1}" if ":" in host else f"{host}:{port + 1}"
    # Without it the loss of any node aborts every process; with it, collectives raise.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # nobody here asks it
    try:
        jax.distributed.initialize(
            coordinator,
            args.nnodes,
            args.node_rank,
            initialization_timeout=args.dist_timeout,
            heartbeat_timeout_seconds=_JAX_HEARTBEAT_S,
            coordinator_bind_address=coordinator,
            cluster_detection_method="deactivate",
        )
    except RuntimeError as error:
        allowed = f"an address whose next port, {port + 1}, is free as well ({error})"
        raise ConfigError(field="--dist-init-addr", value=args.dist_init_addr, allowed=allowed) from error


@contextlib.contextmanager
def _native_output_on_stderr() -> Iterator[None]:
    """What libraries print to file descriptor 1 goes to stderr meanwhile: Gloo says there that it is connected."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with (
            open(kept, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, closefd=False) as ours,
            contextlib.redirect_stdout(ours),
        ):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _end_process(reason: str) -> NoReturn:
    """Without the usual way out, on which jax would wait for the node that is gone."""
    print(f"tpukv: error: {reason}; this node ends, too", file=sys.stderr, flush=True)
    os._exit(_FAILED)
