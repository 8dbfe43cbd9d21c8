"""When a server saves and from what it starts: hosted experts on one side, a folder of generations on the other."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

from experts_server.checkpoints.checkpoint import CheckpointFolder
from experts_server.checkpoints.snapshot import (
    Snapshot,
    check_can_be_saved,
    check_fits,
    differing_keys,
    entries_in,
    entries_of,
    restore,
    take,
    where_another_class,
)
from experts_server.checkpoints.trial import keeping_objects
from experts_server.configuration.config import ServingConfig
from experts_server.hosting.hosted import HostedExpert
from experts_server.queues.registry import Registry
from moe_autograd.errors import CheckpointError, listed

logger = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 60.0
HANGING_TIMEOUT_S = 10.0
SLOW_DISK_S = 20.0

Args = TypeVarTuple("Args")
R = TypeVar("R")


class Saver:
    """Loads at the start, saves on request, from time to time, and at the end.

    Args:
        registry: what is hosted.
        config: where to, how often, and how many generations stay.
        clock: seconds that only grow.

    Threads: the event loop's; files are written on one of its own, which is there from the start: the last save comes
    when the system may have none to give.
    """

    def __init__(
        self, registry: Registry, config: ServingConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry = registry
        self._config = config
        self._folder: CheckpointFolder | None = None
        self._entries: dict[str, dict[str, str]] = {}  # of each expert's module, when it was built
        self._is_saving = asyncio.Lock()
        self._taking: asyncio.Future[list[Any]] | None = None
        self._is_ending = False
        self._clock = clock
        self._saved_at = self._failed_at = clock()
        self._thread = ThreadPoolExecutor(1, "experts-server-saver")

    @property
    def age_s(self) -> float:
        """How long ago the last save was, or the start."""
        return self._clock() - self._saved_at

    def open(self) -> None:
        """Take the folder, once, and load its newest whole generation; if there is none, write the first.

        So each expert has a state that was saved before, and what cannot be saved, or loaded again, is known at once.

        Raises:
            CheckpointError: the folder cannot be used, no generation is whole, it does not fit what is hosted, or
                what is hosted cannot be saved, or not be loaded again.
        """
        if self._config.checkpoint_dir is None or self._folder is not None:
            return
        self._folder = CheckpointFolder(self._config.checkpoint_dir, self._config.keep_checkpoints)
        self._folder.remove_leftovers()
        self._entries = {name: entries_of(queue.hosted) for name, queue in self._registry.items()}
        newest = self._folder.read_newest()
        if newest is None:
            logger.info("began with %s", self._folder.write(self._first_snapshots()))
            return
        name, snapshots = newest
        if snapshots.keys() != self._registry.keys():
            raise CheckpointError(
                f"checkpoint {name}: expected the configured experts {listed(self._registry)}, got "
                f"{listed(snapshots)}. Configure what was saved, or use another checkpoint_dir, and "
                "bring the weights there by experts-server export and import."
            )
        fitting = [(self._registry[expert].hosted, snapshot) for expert, snapshot in snapshots.items()]
        for hosted, snapshot in fitting:
            check_fits(hosted, snapshot)
        _warn_of_other_classes(name, fitting)
        for hosted, snapshot in fitting:  # only now: all of them are restored, or none
            with hosted.in_memory(for_update=True):
                restore(hosted, snapshot)
                check_can_be_saved(hosted)  # another version may have saved more
        logger.info("loaded %s", name)

    def _first_snapshots(self) -> Iterator[Snapshot]:
        for queue in self._registry.values():
            with queue.hosted.in_memory(for_update=True):
                snapshot = take(queue.hosted)
                # It is that already. But whether it can be loaded, the next start would be the first to know.
                with keeping_objects(queue.hosted):
                    restore(queue.hosted, snapshot)
                yield snapshot

    async def start(self) -> None:
        """Start its thread."""
        await self.in_thread(lambda: None)

    async def in_thread(self, function: Callable[[*Args], R], *args: *Args) -> R:
        """Run a function on its thread, after those that were given before."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, functools.partial(function, *args)
        )

    def close(self) -> None:
        """Release the folder, and the thread."""
        self._thread.shutdown(wait=False)
        if self._folder is not None:
            self._folder.close()

    async def save(self) -> str:
        """Write a checkpoint; return its name once it is safe on the disk.

        Raises:
            CheckpointError: there is no folder for it, it could not be written, or an expert hangs.
        """
        if self._folder is None:
            raise CheckpointError(
                "server: expected a checkpoint_dir to save to, got none. Start it with --checkpoint-dir."
            )
        return await self._save(self._folder, SNAPSHOT_TIMEOUT_S)

    def leave_to_last(self) -> None:
        """Give up saves that wait for an expert, and those to come but for the last: it would wait for them."""
        self._is_ending = True
        if self._taking is not None:
            self._taking.cancel()

    async def save_last(self, timeout_s: float | None) -> None:
        """Save, if there is a folder for it; an expert that hangs keeps the state that was saved before.

        Args:
            timeout_s: how long experts that still compute, and so may hang, have; `None`: none of them does.
        """
        if self._folder is not None:
            patience_s = SNAPSHOT_TIMEOUT_S if timeout_s is None else max(timeout_s, HANGING_TIMEOUT_S)
            await self._save(self._folder, patience_s, goes_on=True, is_last=True)

    async def save_when_due(self) -> None:
        """Save if the interval has passed; a failure is logged, and tried again after the next interval.

        An expert that hangs keeps the state that was saved before, and holds up no other's. None is due before the last
        save, nor while another one is under way.
        """
        rested_s = self._clock() - max(self._saved_at, self._failed_at)
        is_due = rested_s >= self._config.checkpoint_interval_s
        if self._folder is None or not is_due or self._is_ending or self._is_saving.locked():
            return
        try:
            await self._save(self._folder, SNAPSHOT_TIMEOUT_S, goes_on=True)
        except CheckpointError as error:
            self._failed_at = self._clock()
            logger.log(logging.INFO if self._is_ending else logging.ERROR, "%s", error)

    async def _save(
        self, folder: CheckpointFolder, timeout_s: float, *, goes_on: bool = False, is_last: bool = False
    ) -> str:
        """Write a generation; where an expert does not come to rest, fail, or go on with what was saved of it."""
        # A caller that goes away must not stop it half way: the thread would go on writing without the lock.
        saving = self._save_whole(folder, timeout_s, goes_on, is_last)
        return await asyncio.shield(asyncio.ensure_future(saving))

    async def _save_whole(
        self, folder: CheckpointFolder, timeout_s: float, goes_on: bool, is_last: bool
    ) -> str:
        async with self._is_saving:
            taken = await self._take_all(timeout_s, is_last)
            for expert, result in taken.items():
                if isinstance(result, TimeoutError):
                    taken[expert] = await self.in_thread(_saved_before, folder, expert, timeout_s, goes_on)
                elif isinstance(result, BaseException):
                    raise CheckpointError(f"server: expected a copy of each expert, got {result}") from result
            self._tell_of_new_entries(taken)
            name = await self._written(folder, list(taken.values()))
            self._saved_at = self._clock()
            logger.info("saved %s", name)
            return name

    def _tell_of_new_entries(self, taken: Mapping[str, Snapshot]) -> None:
        """Tell of modules that have come to entries of `state_dict` that they do not have when they are built."""
        for expert, snapshot in taken.items():
            differing = differing_keys(self._entries[expert], entries_in(snapshot))
            if differing:
                logger.error(
                    "expert %r: its state_dict is not the one that it was built with (differing: %s), so no server "
                    "starts from this checkpoint. Have its class make all entries when it is built.",
                    expert,
                    listed(differing),
                )

    async def _written(self, folder: CheckpointFolder, snapshots: list[Snapshot]) -> str:
        """Write a generation; tell of a disk that is slow, or hangs, as nothing else would: a stop waits for it."""
        writing = asyncio.ensure_future(self.in_thread(folder.write, snapshots))
        started = time.monotonic()
        while not (await asyncio.wait({writing}, timeout=SLOW_DISK_S))[0]:
            taken_s = time.monotonic() - started
            logger.warning(
                "checkpoint_dir %r: a save is not on the disk after %.0f s", str(folder.folder), taken_s
            )
        return await writing

    async def _take_all(self, timeout_s: float, is_last: bool) -> dict[str, Any]:
        """Copy each expert, all between the same calls; what an expert raised, or a `TimeoutError`, is in its place."""
        names = list(self._registry)
        self._taking = asyncio.ensure_future(self._registry.inspect(names, take, timeout_s))
        if self._is_ending and not is_last:
            self._taking.cancel()
        try:
            return dict(zip(names, await self._taking, strict=True))
        except asyncio.CancelledError:
            if is_last or not self._is_ending:
                raise
            computing = [
                repr(name) for name, queue in self._registry.items() if queue.computing_since is not None
            ]
            when = f"while {listed(computing)} still computed" if computing else "before all had"
            raise CheckpointError(
                f"server: expected every expert to come to rest, got a stop {when}. The last save comes next: see "
                "what it says of them."
            ) from None
        finally:
            self._taking = None


def _warn_of_other_classes(name: str, fitting: Iterable[tuple[HostedExpert, Snapshot]]) -> None:
    """Files are renamed, so these are loaded; once for all experts of a class."""
    experts: dict[str, list[str]] = {}
    for hosted, snapshot in fitting:
        if (told := where_another_class(hosted, snapshot)) is not None:
            experts.setdefault(told, []).append(hosted.name)
    for told, names in experts.items():
        logger.warning(
            "checkpoint %s: %s (experts %s). It is loaded. If they do not compute the same, "
            "stop the server, and configure what was saved.",
            name,
            told,
            listed(names),
        )


def _saved_before(folder: CheckpointFolder, expert: str, timeout_s: float, goes_on: bool) -> Snapshot:
    """Return what the newest whole generation holds of an expert that does not come to rest."""
    found = folder.read_newest_of(expert) if goes_on else None
    if found is None:
        raise CheckpointError(
            f"server: expected every expert to be at rest within {timeout_s:g} s, got {expert!r} still computing. "
            "The checkpoint before is untouched; save again when it is done."
        )
    generation, snapshot = found
    logger.error(
        "expert %r still computes after %g s: its state of %s goes on into the next one",
        expert,
        timeout_s,
        generation,
    )
    return snapshot
