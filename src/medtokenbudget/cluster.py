"""Connecting to Ray, and what is said of it. Common ground because several commands run on a cluster; Ray is an optional extra."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medtokenbudget.errors import RequestError, WorkError, first_line

_SECONDS = 10


@contextmanager
def ray_cluster(address: str | None) -> Iterator[Any]:
    """Connect to a Ray cluster, or start Ray on this machine, for the duration of a `with` block.

    A process that is already connected stays connected, before and after the block.

    Args:
        address: Address of a running cluster ('auto', 'host:port', 'ray://host:port'); None starts Ray on this machine.

    Yields:
        The `ray` module.

    Raises:
        RequestError: Ray is not installed.
        WorkError: No cluster answers at this address, or Ray does not start.
    """
    try:
        import ray
    except ImportError:
        raise RequestError("Ray is not installed. Install it with: pip install 'medtokenbudget[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    _connect(ray, address)
    try:
        yield ray
    finally:
        ray.shutdown()


def node() -> str:
    """The name of this machine in messages."""
    return socket.gethostname()


def not_shared(folder: Path) -> str:
    """What a worker says that does not see the folder of the results."""
    return f"{folder} does not exist on node {node()}. It must be on a file system that all nodes share."


def stopped(failure: str) -> WorkError:
    """The end of a command whose worker reported a failure."""
    return WorkError(f"{failure} Finished shards are kept; run the same command again to resume.")


def _connect(ray: Any, address: str | None) -> None:
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    options: dict[str, Any] = {} if address else {"include_dashboard": False}
    try:
        if host and port.isdecimal():
            # Ray itself retries for minutes before it gives up.
            socket.create_connection((host, int(port)), timeout=_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="warning", **options)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        where = f"No Ray cluster answers at '{address}'" if address else "Ray does not start on this machine"
        reason = first_line(error).rstrip(".")
        raise WorkError(f"{where} ({reason}). Check --address, or run on this machine with --engine local.") from None
