"""Many jobs at once: in this process, in worker processes, or on a Ray cluster (an optional extra).

Worker processes are spawned, not forked, because the parent may have threads, and they end with it, even if it is killed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from medtokenbudget.config import Parallel, Settings
from medtokenbudget.errors import RequestError, WorkError, first_line

Engine = Literal["local", "ray"]
Job = TypeVar("Job")
Result = TypeVar("Result")
_PR_SET_PDEATHSIG = 1
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_CONNECT = 10


@dataclass(frozen=True)
class Execution(Settings):
    """How a sweep runs.

    Attributes:
        engine: 'local' processes, or a 'ray' cluster.
        jobs: Units at the same time; 0 means one per core.
        address: Address of a running Ray cluster.
    """

    engine: Engine = "local"
    jobs: Parallel = 0
    address: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address is not None and self.engine != "ray":
            raise RequestError("An address is only used with a Ray cluster: choose the engine 'ray', or leave it out.")


def run_jobs(work: Callable[[Job], Result], jobs: Sequence[Job], execution: Execution, processes: int = 1) -> Iterator[Result]:
    """Yield what `work` returns for each job, in the order in which they finish.

    Args:
        work: A function that other processes can import, with arguments that can be pickled. On a cluster it may run twice for
            one job, because the jobs of a lost node are repeated.
        jobs: What it is called with, one after another.
        execution: The engine, and the address of a cluster.
        processes: Worker processes of the engine 'local'; 1 works in this process.
    """
    if execution.engine == "ray":
        yield from _run_on_ray(work, jobs, execution.address)
    elif processes == 1:
        yield from map(work, jobs)
    else:
        with process_pool(processes) as pool:
            for future in as_completed([pool.submit(work, job) for job in jobs]):
                yield future.result()


def _run_on_ray(work: Callable[[Job], Result], jobs: Sequence[Job], address: str | None) -> Iterator[Result]:
    if not jobs:
        return
    with ray_cluster(address) as ray:
        gpus = 1 if ray.cluster_resources().get("GPU", 0) >= 1 else 0
        task: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=5)(_call)
        pending = [task.remote(work, job) for job in jobs]
        try:
            while pending:
                ready, pending = ray.wait(pending, num_returns=1)
                yield from ray.get(ready)
        except ray.exceptions.RayError as error:
            raise WorkError(f"Ray gave up on a training: {error}. Run the same command again to continue with the rest.") from None


def _call(work: Callable[[Job], Result], job: Job) -> Result:
    return work(job)


# Worker processes ----------------------------------------------------------------------------------------------------


@contextmanager
def process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Open a pool of spawned processes, each of which ends with this one.

    Raises:
        WorkError: If one of them dies inside the block.
    """
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, mp_context=context, initializer=end_with_parent, initargs=(os.getpid(),)) as pool:
            yield pool
    except BrokenProcessPool:
        raise WorkError(
            'A worker process died. In a Python script, use several processes only below `if __name__ == "__main__":`, or one '
            "(jobs=1, workers=1). Otherwise memory may have run out: use fewer."
        ) from None


def end_with_parent(parent: int) -> None:
    """End this process as soon as its parent is gone: at once on Linux, within a second elsewhere.

    Args:
        parent: Process id of the parent; it may be gone by the time this runs.
    """
    if sys.platform == "linux":
        # Tied to the parent's thread that started this process; the watch below covers the rest.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(parent,), name="mtb-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)


# Ray -----------------------------------------------------------------------------------------------------------------


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


def _connect(ray: Any, address: str | None) -> None:
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    options: dict[str, Any] = {} if address else {"include_dashboard": False}
    try:
        if host and port.isdecimal():
            # Ray itself retries for minutes before it gives up.
            socket.create_connection((host, int(port)), timeout=_SECONDS_TO_CONNECT).close()
        ray.init(address=address, log_to_driver=False, logging_level="warning", **options)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        where = f"No Ray cluster answers at '{address}'" if address else "Ray does not start on this machine"
        reason = first_line(error).rstrip(".")
        raise WorkError(f"{where} ({reason}). Check --address, or run on this machine with --engine local.") from None


def node() -> str:
    """Return the name of this machine in messages."""
    return socket.gethostname()


def not_shared(folder: Path) -> str:
    """Return what a worker says that does not see the folder of the results."""
    return f"{folder} does not exist on node {node()}. It must be on a file system that all nodes share."


def stopped(failure: str) -> WorkError:
    """Return the error of a command whose worker reported a failure."""
    return WorkError(f"{failure} Finished shards are kept; run the same command again to resume.")
