"""One resumable runner for work in units: shards of a store, shards of a table, trainings of a sweep.

A unit is made in this process, in worker processes or on a Ray cluster (an optional extra), and leaves the same bytes everywhere.
Callers leave out finished units; units write their results themselves, so that a stopped command resumes.
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
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from medtokenbudget.config import Parallel, Settings
from medtokenbudget.errors import MedTokenBudgetError, RequestError, WorkError, first_line
from medtokenbudget.runtime import worker_devices

Engine = Literal["local", "ray"]
Advance = Callable[[int], Any]
"""Is called with the number of images, or of whatever a unit has, that are done."""
Unit = TypeVar("Unit")
Result = TypeVar("Result")
Make = Callable[[Any, Sequence[Unit], Advance], Iterator[Result]]
OpenWorker = Callable[[str], Any] | None
RETRIES = 10
"""How often Ray gives out a unit again; one that kills every worker must not keep a cluster busy forever."""
_PR_SET_PDEATHSIG = 1
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_CONNECT = 10


@dataclass(frozen=True)
class Execution(Settings):
    """How units of work run: by 'local' processes or a 'ray' cluster, `jobs` at the same time (0 means one per core)."""

    engine: Engine = "local"
    jobs: Parallel = 0
    address: str | None = None
    """Address of a running Ray cluster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address is not None and self.engine != "ray":
            raise RequestError("An address is only used with a Ray cluster: choose the engine 'ray', or leave it out.")


def run_units(
    units: Sequence[Unit],
    make: Make[Unit, Result],
    execution: Execution,
    *,
    processes: int = 1,
    device: str = "auto",
    cores: int = 1,
    state: Any = None,
    open_worker: OpenWorker = None,
    advance: Advance | None = None,
) -> Iterator[Result]:
    """Make units, and yield the result of each, in the order in which they finish.

    `make` is called with the state, units and `advance`, and yields one result per unit. In this process it gets all units at
    once, so that it can read ahead, and works with `state`, such as a loaded backbone. Other processes import it, so it is a
    function of a module or a `partial` of one; `open_worker` gives each of them its state, from the name of its device. On a
    cluster it may run twice for one unit, because the units of a lost node are given out again. With `advance`, `len(unit)` is
    what a unit counts for.

    Raises:
        WorkError: A worker died or reported an error. What is finished is kept.
    """
    if execution.engine == "local" and processes == 1:
        yield from make(state, units, advance or _ignore)
        return
    if execution.engine == "ray":
        finished = _on_ray(units, make, open_worker, execution.address, device, cores)
    else:
        finished = _in_processes(units, make, open_worker, worker_devices(device, processes))
    for unit, result in finished:
        if advance is not None:
            advance(len(unit))  # type: ignore[arg-type]
        yield result


def _ignore(count: int) -> None:
    pass


_opened: dict[str, Any] = {}
"""The state of this worker process, by run; a process of a cluster may serve several runs, one after another."""
_device = "auto"
"""The device of this worker process."""


def _call(run: str, open_worker: OpenWorker, make: Make[Unit, Result], unit: Unit, device: str | None = None) -> Result:
    """Make one unit in a worker process, which opens its state once."""
    if run not in _opened:
        # One state at a time: two backbones may not fit into a GPU.
        _opened.clear()
        _opened[run] = None if open_worker is None else open_worker(device or _device)
    [result] = make(_opened[run], [unit], _ignore)
    return result


def _in_processes(
    units: Sequence[Unit], make: Make[Unit, Result], open_worker: OpenWorker, devices: Sequence[str]
) -> Iterator[tuple[Unit, Result]]:
    run = uuid.uuid4().hex
    with process_pool(len(devices), devices) as pool:
        # All at once: the pool gives each worker the next unit when it has finished one.
        waiting = {pool.submit(_call, run, open_worker, make, unit): unit for unit in units}
        for future in as_completed(waiting):
            yield waiting[future], future.result()


@contextmanager
def process_pool(workers: int, devices: Sequence[str] = ()) -> Iterator[ProcessPoolExecutor]:
    """Open a pool of processes, each with a device of its own if `devices` are given. They end with this process."""
    # Spawned, not forked, because this process may have threads.
    context = multiprocessing.get_context("spawn")
    names = context.SimpleQueue()
    for name in devices:
        names.put(name)
    try:
        with ProcessPoolExecutor(workers, context, initializer=_begin_worker, initargs=(os.getpid(), names)) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(cancel_futures=True)  # otherwise the pool makes all other units before the error is seen
                raise
    except BrokenProcessPool:
        raise WorkError(
            'A worker process died. In a Python script, use several processes only below `if __name__ == "__main__":`, or one '
            "(jobs=1, workers=1). Otherwise memory may have run out: use fewer."
        ) from None


def _begin_worker(parent: int, names: Any) -> None:
    """Take a device, if there is one for this process, and end as soon as the process `parent` is gone."""
    global _device
    if sys.platform == "linux":
        # At once, but tied to the parent's thread that started this process; the watch below covers the rest.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(parent,), name="mtb-parent", daemon=True).start()
    if not names.empty():
        _device = names.get()
        if _device.startswith("cuda"):
            import torch

            torch.cuda.set_device(_device)  # what asks for 'cuda' in this process gets its own GPU


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def _on_ray(
    units: Sequence[Unit], make: Make[Unit, Result], open_worker: OpenWorker, address: str | None, device: str, cores: int
) -> Iterator[tuple[Unit, Result]]:
    if not units:
        return
    kind = device.partition(":")[0]  # a task sees only its own GPU, whatever its number on the node
    with ray_cluster(address) as ray:
        task = ray.remote(
            num_cpus=cores,
            num_gpus=1 if kind != "cpu" and ray.cluster_resources().get("GPU") else 0,
            max_retries=RETRIES,  # if a node or a worker dies; an error that a task raises is not retried
            max_calls=0,  # processes with a GPU stay too, with the model that they have loaded
        )(_call)
        # Sent once, not with every unit.
        shared = (uuid.uuid4().hex, ray.put(open_worker), ray.put(make))
        waiting = {task.remote(*shared, unit, kind): unit for unit in units}
        try:
            while waiting:
                # As they finish, so that a slow node holds nothing up.
                [done], _ = ray.wait(list(waiting), num_returns=1)
                result = ray.get(done)
                yield waiting.pop(done), result
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, MedTokenBudgetError):
                raise WorkError(f"{cause} What is finished is kept; run the same command again to resume.") from None
            raise WorkError(f"Ray gave up on a part: {first_line(error)}. Run the same command again to resume.") from None
        finally:
            for other in waiting:
                ray.cancel(other, force=True)


@contextmanager
def ray_cluster(address: str | None) -> Iterator[Any]:
    """Connect to the Ray cluster at `address`, or start Ray on this machine, and yield the `ray` module.

    A process that is already connected stays connected, before and after the block.
    """
    try:
        import ray
    except ImportError:
        raise RequestError("Ray is not installed. Install it with: pip install 'medtokenbudget[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if address is None:
        options["include_dashboard"] = False
    try:
        if host and port.isdecimal():
            # Ray itself retries for minutes before it gives up.
            socket.create_connection((host, int(port)), timeout=_SECONDS_TO_CONNECT).close()
        ray.init(address, **options)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        where = f"No Ray cluster answers at '{address}'" if address else "Ray does not start on this machine"
        reason = first_line(error).rstrip(".")
        raise WorkError(f'{where} ({reason}). Check `address`, or run on this machine with `engine="local"`.') from None
    try:
        yield ray
    finally:
        ray.shutdown()


def require_shared(folder: Path) -> None:
    """Raise a WorkError on a node that does not see the folder of the results."""
    if not folder.exists():
        raise WorkError(f"{folder} is not on node {socket.gethostname()}. It must be on a file system that all nodes share.")
