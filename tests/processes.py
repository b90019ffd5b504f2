"""Commands in processes of their own, under limits, for the tests of faults.

A fork server that has imported everything starts a command in milliseconds; importing torch anew for each would take seconds.
"""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [f"medtokenbudget.{name}" for name in ("api", "runs.paper", "model.onnx", "reporting", "data")]
assert all(map(importlib.util.find_spec, _PRELOADED)), "the fork server ignores a module that does not exist"
_CONTEXT.set_forkserver_preload(_PRELOADED)
_CAPABILITIES_3 = 0x20080522
_OVERRIDE_PERMISSIONS = 0b1110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER


@dataclass(frozen=True)
class Limits:
    """What a command may not do."""

    file_bytes: int | None = None
    """Largest file that it can write: a write beyond fails, as on a full disk."""
    handles: int | None = None
    obey_permissions: bool = False
    """Also as root."""

    def apply(self) -> None:
        if self.file_bytes is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.file_bytes, self.file_bytes))
        if self.handles is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.handles, self.handles))
        if self.obey_permissions and os.getuid() == 0:
            _give_up_override()


@dataclass(frozen=True)
class Ended:
    """Exit code and everything that was printed."""

    code: int | None
    said: str


class Running:
    """A command that runs in a process group of its own."""

    def __init__(self, arguments: Sequence[object], log: Path, limits: Limits | None = None) -> None:
        self.log = log
        words = [str(word) for word in arguments]
        self.process: BaseProcess = _CONTEXT.Process(target=_run, args=(words, str(log), limits or Limits()))
        self.process.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self, group: bool = False) -> None:
        """Kill the process, or it and its workers; a command that ended meanwhile is left alone."""
        if self.process.is_alive():
            if group and os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, signal.SIGKILL)
            else:
                self.process.kill()

    def wait(self) -> Ended:
        self.process.join(600)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return Ended(self.process.exitcode, self.log.read_text(errors="replace") if self.log.exists() else "")


def run(arguments: Sequence[object], log: Path, limits: Limits | None = None) -> Ended:
    """Run a command to its end."""
    return Running(arguments, log, limits).wait()


def _run(words: list[str], log: str, limits: Limits) -> None:
    os.setpgrp()
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.close(stream)
    limits.apply()
    import torch

    from medtokenbudget.cli import main

    torch.set_num_threads(1)
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _give_up_override() -> None:
    """Root without these capabilities is bound to the permissions of files like anybody."""
    library = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_CAPABILITIES_3, 0), (_Sets * 2)()
    assert library.capget(ctypes.byref(header), sets) == 0
    sets[0].effective &= ~_OVERRIDE_PERMISSIONS
    sets[0].permitted &= ~_OVERRIDE_PERMISSIONS
    assert library.capset(ctypes.byref(header), sets) == 0
