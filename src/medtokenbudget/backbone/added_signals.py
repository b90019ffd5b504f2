"""The signals of an open store that have files of their own: which rows have them, their values, their checksums."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path

import numpy as np

from medtokenbudget.backbone.reading import MappedRows
from medtokenbudget.backbone.shards import Sidecar, row_checksum
from medtokenbudget.backbone.signal_files import SignalFile, damaged_signal, found_signals, read_signal, signal_path
from medtokenbudget.errors import MissingSignalError, WorkError


class AddedSignals:
    """Signals beside the shards.

    Args:
        path: Folder of the store.
        sidecars: The finished shards.
        shard: Shard of each row that the store shows.
        offset: Place of each row in its shard.
    """

    def __init__(self, path: Path, sidecars: Mapping[int, Sidecar], shard: np.ndarray, offset: np.ndarray) -> None:
        self.path, self.sidecars = path, sidecars
        self._shard, self._offset = shard, offset
        self._open: dict[tuple[int, str], tuple[SignalFile, MappedRows]] = {}
        self._sound: dict[str, np.ndarray] = {}

    def rows_without(self, name: str, fields: Callable[[int], Container[str]]) -> int:
        """Rows that carry a signal neither here nor among the `fields` of their shard."""
        absent = 0
        for shard in np.unique(self._shard).tolist():
            if name in fields(shard):
                continue
            places = self._offset[self._shard == shard]
            file = read_signal(self.path, shard, name, self.sidecars[shard])
            absent += len(places) if file is None else sum(place in file.missing for place in places.tolist())
        return absent

    def source(self, shard: int, name: str) -> MappedRows:
        """The values of a signal of a shard."""
        if (shard, name) not in self._open:
            file = read_signal(self.path, shard, name, self.sidecars[shard])
            if file is None:
                raise MissingSignalError(
                    f"Store {self.path} has no {name} any more. Run its `mtb extract` again with --signals {name}."
                )
            self._open[shard, name] = (file, file.map(name))
        return self._open[shard, name][1]

    def check_sound(self, rows: np.ndarray, name: str) -> None:
        """Compare the checksums of rows that this process reads for the first time, where their values come from here."""
        sound = self._sound.setdefault(name, np.zeros(len(self._shard), bool))
        for row in rows[~sound[rows]].tolist():
            shard, place = int(self._shard[row]), int(self._offset[row])
            if (shard, name) in self._open:
                file, values = self._open[shard, name]
                if row_checksum({name: values.array}, place) != file.checksums[place]:
                    raise damaged_signal(file.path)
            sound[row] = True

    def damaged(self) -> list[str]:
        """Names of the files whose values are not those that were written for the rows of their shard."""
        bad = []
        for index, names in found_signals(self.path).items():
            for name in names if index in self.sidecars else ():
                file = read_signal(self.path, index, name, self.sidecars[index])
                if file is None or not _is_whole(file, name):
                    bad.append(signal_path(self.path, index, name).name)
        return bad


def _is_whole(file: SignalFile, name: str) -> bool:
    try:
        values = {name: file.map(name).array}
    except WorkError:
        return False
    return all(row_checksum(values, row) == checksum for row, checksum in enumerate(file.checksums))
