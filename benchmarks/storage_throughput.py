"""What a stored page costs beside the same bytes written and read without a storage.

    python benchmarks/storage_throughput.py [--folder DIR] [--page-bytes N] [--pages N] [--rounds N]

Every figure is the best of some rounds, in MB/s; the ratios are of one run. `floor` is a file that is written, flushed
and renamed, or opened and read; `file` is the storage; `codec` makes or checks a header as well; `workers` adds the
queues and threads.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import queue
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from app.core.keys import StorageIdentity
from app.hicache.storage.base import NO_DEADLINE, Outcome, PageKey
from app.hicache.storage.chunks import Arrival
from app.hicache.storage.file import FileStorage
from app.hicache.storage.value import ValueCodec
from app.hicache.storage.workers import StorageWorkers

IDENTITY = StorageIdentity(
    model="model", weights="weights", dtype="bfloat16", layout="full", page_size=16, tp_size=1, first_kv_head=0,
    end_kv_head=3,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--page-bytes", type=int, default=16 * 30 * 2 * 3 * 64 * 4)  # SmolLM2-135M, 16 tokens, float32
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="storage-throughput-", dir=args.folder))
    try:
        measure(folder, args.page_bytes, args.pages, args.rounds)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, page_bytes: int, num_pages: int, rounds: int) -> None:
    codec = ValueCodec(IDENTITY, page_bytes)
    keys = [PageKey(hashlib.sha256(b"%d" % number).digest()) for number in range(num_pages)]
    pages = [os.urandom(page_bytes) for _ in keys]
    total = page_bytes * num_pages
    plain = folder / "plain"
    plain.mkdir()
    storage = FileStorage(folder / "file", 4 * total)
    coded = FileStorage(folder / "codec", 4 * total)
    workers = StorageWorkers(FileStorage(folder / "workers", 4 * total))
    arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()

    def floor_write() -> None:
        for key, page in zip(keys, pages, strict=True):
            temp = plain / "temp"
            with temp.open("wb", buffering=0) as file:
                file.write(page)
                os.fsync(file.fileno())
            temp.rename(plain / key.hex())

    def floor_read() -> None:
        for key in keys:
            with (plain / key.hex()).open("rb", buffering=0) as file:
                file.read()

    def file_write() -> None:
        values = [(key, (page,)) for key, page in zip(keys, pages, strict=True)]
        assert set(storage.set(values, NO_DEADLINE)) == {Outcome.STORED}

    def file_read() -> None:
        for key in keys:  # one by one, so that memory is given back as in the floor
            assert storage.get([key], NO_DEADLINE)[0].outcome is Outcome.HIT

    def codec_write() -> None:
        values = [(key, codec.encode(key, page)) for key, page in zip(keys, pages, strict=True)]
        assert set(coded.set(values, NO_DEADLINE)) == {Outcome.STORED}

    def codec_read() -> None:
        for key in keys:
            (got,) = coded.get([key], NO_DEADLINE)
            assert codec.decode(key, got.value or b"").outcome is Outcome.HIT

    def arrive(outcome: Outcome) -> None:
        num_left = num_pages
        while num_left:
            results = arrivals.get().results
            assert {each.outcome for each in results} == {outcome}
            num_left -= len(results)

    def workers_write() -> None:
        workers.set(codec, keys, pages, arrivals.put, NO_DEADLINE)
        arrive(Outcome.STORED)

    def workers_read() -> None:
        workers.get(codec, keys, arrivals.put, NO_DEADLINE)
        arrive(Outcome.HIT)

    def workers_empty() -> None:
        workers.delete(keys, arrivals.put, NO_DEADLINE)
        arrive(Outcome.DELETED)

    copy = bytearray(page_bytes)
    speeds: dict[str, float] = {}
    cpu: dict[str, float] = {}
    runs: tuple[tuple[str, Callable[[], None]], ...] = (
        ("write floor", floor_write),
        ("write file", file_write),
        ("write codec", codec_write),
        ("write workers", workers_write),
        ("read floor", floor_read),
        ("read file", file_read),
        ("read codec", codec_read),
        ("read workers", workers_read),
        ("encode", lambda: [codec.encode(key, page) for key, page in zip(keys, pages, strict=True)] and None),
        ("memcpy", lambda: [copy.__setitem__(slice(None), page) for page in pages] and None),
    )
    for index in range(rounds):
        if index:
            workers_empty()
        for name, run in runs:
            started, started_cpu = time.perf_counter(), time.process_time()
            run()
            speeds[name] = max(speeds.get(name, 0), total / (time.perf_counter() - started) / 1e6)
            cpu[name] = min(cpu.get(name, 1e9), (time.process_time() - started_cpu) / num_pages * 1e6)
    workers.close(10)
    storage.close()
    coded.close()
    print(f"{num_pages} pages of {page_bytes:,} bytes, best of {rounds} rounds")
    for name, speed in speeds.items():
        floor = speeds.get(f"{name.partition(' ')[0]} floor", speeds["memcpy"])
        print(f"{name:14} {speed:8.0f} MB/s  {speed / floor:6.2f} of its floor  {cpu[name]:7.0f} us of CPU a page")


if __name__ == "__main__":
    main()
