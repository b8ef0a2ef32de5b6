"""Checks of the folders that a run writes to: access, room, rate, fsync and their clock."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.engine.formats import bytes_of
from mtrain.doctor.facts import Disk, Facts
from mtrain.doctor.rows import Row, ok, slow, wrong
from mtrain.plan.count import parameters
from mtrain.units import bytes_, duration

# Below this, a checkpoint of a billion parameters with its optimizer state takes ten minutes.
LEAST_BYTES_PER_S = 20 << 20
# A save waits for some fsyncs per file.
MOST_FSYNC_S = 1.0
LEAST_FILES = 10_000
MEMORY = ("tmpfs", "ramfs")
# Seconds: logs and traces of machines no longer line up; signed requests and Kerberos refuse.
SKEWED_S = 1.0
REFUSED_S = 300.0


def check(facts: Facts) -> Iterator[Row]:
    """Yield the rows of each folder, and of the clocks."""
    for disk in facts.disks:
        yield from _disk(disk, facts)
    yield from _clock(facts)


def _disk(disk: Disk, facts: Facts) -> Iterator[Row]:
    where = f"{disk.folder}{f', {disk.filesystem}' if disk.filesystem else ''}"
    if disk.error:
        fix = f"{disk.key}=FOLDER on a disk that takes files, or free room on this one"
        yield wrong(f"{disk.key} write", f"{disk.error} ({where})", fix)
    yield from _room(disk, facts, where)
    rate = disk.write_bytes_per_s
    if rate is not None:
        yield _rate(disk, rate, facts, where)
    if disk.fsync_s is not None:
        text = duration(disk.fsync_s)
        row = f"{disk.key} fsync"
        if disk.fsync_s > MOST_FSYNC_S:
            yield slow(row, text, f"{disk.key}=FOLDER on a faster disk", disk.fsync_s, "s")
        else:
            yield ok(row, text, disk.fsync_s, "s")


def _rate(disk: Disk, rate: float, facts: Facts, where: str) -> Row:
    row = f"{disk.key} write"
    text = f"{rate / (1 << 20):.0f} MiB/s ({where})"
    stated = facts.run.cluster.storage_gbps
    # Each rank writes a stream of its own, and this is one.
    share = 0.0 if stated is None else stated * 1e9 / facts.run.parallel.ranks
    if rate < max(LEAST_BYTES_PER_S, share / 2):
        if share:
            text += f"; {share / (1 << 20):.0f} MiB/s is a rank's share of cluster.storage_gbps"
        return slow(row, text, f"{disk.key}=FOLDER on a faster disk", rate, "bytes/s")
    if disk.filesystem in MEMORY and disk.key == "log.runs_dir":
        text += ": in memory, lost when the machine restarts"
        return slow(row, text, f"{disk.key}=FOLDER on a disk", rate, "bytes/s")
    return ok(row, text, rate, "bytes/s")


def _room(disk: Disk, facts: Facts, where: str) -> Iterator[Row]:
    if disk.free_bytes is None:
        return
    row = f"{disk.key} room"
    needed = parameters(facts.run.model) * bytes_of(facts.run.precision.format)
    text = f"{bytes_(disk.free_bytes)} free ({where})"
    if facts.run.checkpoint.saves and disk.free_bytes < needed:
        text = f"{text}; the weights of one checkpoint need {bytes_(needed)}"
        fix = f"free room, or {disk.key}=FOLDER on another disk"
        yield wrong(row, text, fix, disk.free_bytes, "bytes")
    else:
        yield ok(row, text, disk.free_bytes, "bytes")
    if disk.free_files is not None and disk.free_files < LEAST_FILES:
        text = f"{disk.free_files} more files fit ({where})"
        row = f"{disk.key} files"
        yield slow(row, text, "delete small files: inodes run out", disk.free_files, "files")


def _clock(facts: Facts) -> Iterator[Row]:
    skews = [disk.skew_s for disk in facts.disks if disk.skew_s is not None]
    time = "chronyc makestep, or start the time service (chronyd, systemd-timesyncd)"
    skew = max(skews, key=abs, default=None)
    if skew is not None:
        text = f"{duration(abs(skew))} from that of the disk of {facts.disks[0].key}"
        if abs(skew) >= REFUSED_S:
            yield wrong("clock", f"{text}: signed requests are refused", time, skew, "s")
        elif abs(skew) >= SKEWED_S:
            yield slow("clock", f"{text}: logs of machines do not line up", time, skew, "s")
        else:
            yield ok("clock", text, skew, "s")
    clock = facts.clock
    if clock.synchronised is False and facts.run.cluster.nodes > 1:
        yield slow("clock service", "no service sets this clock", time)
    elif clock.most_error_s is not None:
        text = f"set by a service, at most {duration(clock.most_error_s)} off"
        yield ok("clock service", text, clock.most_error_s, "s")
