"""A proxy for HTTP/1.1 on this machine that injects faults, and counts.

    python chaosproxy.py LISTEN_PORT TARGET_PORT ADMIN_PORT

    GET  ADMIN/stats         what has passed so far, and the lines of the requests: "GET /bkt/key HTTP/1.1 bytes=0-99"
    POST ADMIN/set {...}     changes faults
    POST ADMIN/reset         ends all faults and counts from zero

The client signs the address of the proxy, and the Host header passes unchanged, so signatures stay valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import sys
import time
from enum import Enum
from typing import Any

PIECE = 1 << 16
SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>injected</Message></Error>"
HARMLESS: dict[str, Any] = {
    "delay_ms": 0,  # added to the round trip, half of it each way; leaves the throughput alone
    "jitter_ms": 0,
    "rate": 0,  # bytes per second, for each connection and direction
    # How likely each fault is, from 0 to 1
    "p503": 0.0,  # 503 before the request reaches the server
    "p_reset": 0.0,  # the connection is reset before the request reaches the server
    "p_stall": 0.0,  # silence of `stall_s` before the request is forwarded
    "p_late503": 0.0,  # the server does what it is asked, the client reads 503
    "p_swallow": 0.0,  # the server does what it is asked, the client's connection is reset
    "p_eof": 0.0,  # the server does what it is asked, the client's connection is closed
    "p_cut": 0.0,  # the connection is reset after `cut_after` bytes of the answer
    "stall_s": 0.0,
    "cut_after": 0,
    "match": "",  # only requests whose first line this pattern finds
    "max_faults": 0,  # 0: as many as there are
    "seed": None,
}
LATE = ("p_late503", "p_swallow", "p_eof")


class Chaos:
    """The faults to inject, and what was seen."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.random = random.Random(1)
        self.reset()

    def reset(self) -> None:
        self.faults = dict(HARMLESS)
        self.stats: dict[str, Any] = {
            "requests": 0,
            "connections": 0,
            "bytes_up": 0,
            "bytes_down": 0,
            "methods": {},
            "faults": {},
            "log": [],
        }

    def set(self, faults: dict[str, Any]) -> None:
        unknown = sorted(faults.keys() - HARMLESS.keys())
        if unknown:
            raise ValueError(f"there are no faults {unknown}")
        self.faults |= faults
        if self.faults["seed"] is not None:
            self.random.seed(self.faults["seed"])

    def count(self, line: str, asked_range: str) -> None:
        method = line.split(" ", maxsplit=1)[0]
        self.stats["requests"] += 1
        self.stats["methods"][method] = self.stats["methods"].get(method, 0) + 1
        if len(self.stats["log"]) < 5_000:
            self.stats["log"].append(f"{line[:300]} {asked_range}".rstrip())

    def happens(self, fault: str, line: str) -> bool:
        happened, most = self.stats["faults"], self.faults["max_faults"]
        if not self.faults[fault] or (most and sum(happened.values()) >= most) or not re.search(self.faults["match"], line):
            return False
        if self.random.random() >= self.faults[fault]:
            return False
        happened[fault] = happened.get(fault, 0) + 1
        return True


class End(Enum):
    """How a connection ends, after what was sent before."""

    CLOSE = "close"
    RESET = "reset"


class Pipe:
    """One direction of a connection: delays what is sent, and limits its rate."""

    def __init__(self, chaos: Chaos, writer: asyncio.StreamWriter) -> None:
        self._chaos, self._writer = chaos, writer
        self._queue: asyncio.Queue[tuple[float, bytes | End]] = asyncio.Queue(64)
        self._free = 0.0
        self._task = asyncio.create_task(self._run())

    async def put(self, data: bytes | End) -> None:
        faults = self._chaos.faults
        delay = (faults["delay_ms"] + self._chaos.random.uniform(0, faults["jitter_ms"])) / 2_000
        await self._queue.put((time.monotonic() + delay, data))

    async def _run(self) -> None:
        lost = False  # what still comes for a lost connection is taken and dropped, or the sender would wait for ever
        while True:
            at, data = await self._queue.get()
            if isinstance(data, End):
                break
            try:
                await asyncio.sleep(max(at - time.monotonic(), 0))
                if self._chaos.faults["rate"]:
                    self._free = max(self._free, time.monotonic()) + len(data) / self._chaos.faults["rate"]
                    await asyncio.sleep(max(self._free - time.monotonic(), 0))
                if not lost:
                    self._writer.write(data)
                    await self._writer.drain()
            except OSError:
                lost = True
        if data is End.RESET:
            _reset_connection(self._writer)
        else:
            self._writer.close()


def _reset_connection(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Connection:
    """One connection of a client, and the one to the server that belongs to it."""

    def __init__(self, chaos: Chaos, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.chaos, self.reader, self.writer = chaos, reader, writer
        self.down = Pipe(chaos, writer)
        self.up: Pipe | None = None
        self.answers: asyncio.Task[None] | None = None
        self.late = ""
        self.cut: int | None = None

    async def run(self) -> None:
        self.chaos.stats["connections"] += 1
        try:
            while await self.forward():
                pass
        except (OSError, EOFError):  # a client that leaves
            pass
        finally:
            await (self.up or self.down).put(End.CLOSE)

    async def forward(self) -> bool:
        """Forward one request; whether the connection goes on."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        line = head.split(b"\r\n", 1)[0].decode("latin1")
        length = int(_header(head, "content-length") or 0)
        self.chaos.count(line, _header(head, "range"))
        if self.chaos.happens("p_reset", line):
            _reset_connection(self.writer)
            return False
        if self.chaos.happens("p503", line):
            await self.reader.readexactly(length)
            await self.down.put(b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n" % len(SLOW_DOWN))
            await self.down.put(SLOW_DOWN)
            return True
        if self.chaos.happens("p_stall", line):
            await asyncio.sleep(self.chaos.faults["stall_s"])
        self.late = next((fault for fault in LATE if self.chaos.happens(fault, line)), "")
        if self.chaos.happens("p_cut", line):
            self.cut = self.chaos.faults["cut_after"]
        if self.up is None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.chaos.target)
            self.up = Pipe(self.chaos, writer)
            self.answers = asyncio.create_task(self.answer(reader))
        await self.up.put(head)
        while length:
            data = await self.reader.read(min(length, PIECE))
            if not data:
                return False
            length -= len(data)
            self.chaos.stats["bytes_up"] += len(data)
            await self.up.put(data)
        return True

    async def answer(self, server: asyncio.StreamReader) -> None:
        """Pass on what the server sends, as far as the fault of the request allows."""
        with contextlib.suppress(OSError):
            while data := await server.read(PIECE):
                if self.late == "p_swallow":
                    return await self.down.put(End.RESET)
                if self.late == "p_late503":
                    await self.down.put(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                if self.late:
                    break
                if self.cut is not None and len(data) >= self.cut:
                    await self.down.put(data[: self.cut])
                    return await self.down.put(End.RESET)
                if self.cut is not None:
                    self.cut -= len(data)
                self.chaos.stats["bytes_down"] += len(data)
                await self.down.put(data)
        return await self.down.put(End.CLOSE)


def _header(head: bytes, name: str) -> str:
    found = re.search(rb"(?im)^%s:[ \t]*([^\r]*)" % name.encode(), head)
    return found.group(1).decode("latin1") if found else ""


async def _administrate(chaos: Chaos, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readexactly(int(_header(head, "content-length") or 0))
    status = b"200 OK"
    try:
        if b" /reset " in head:
            chaos.reset()
        elif b" /set " in head:
            chaos.set(json.loads(body))
        answer = json.dumps({"config": chaos.faults, **chaos.stats}).encode()
    except ValueError as error:
        status, answer = b"400 Bad Request", str(error).encode()
    writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(answer)) + answer)
    await writer.drain()
    writer.close()


async def main() -> None:
    listen, target, admin = map(int, sys.argv[1:4])
    chaos = Chaos(target)
    clients = await asyncio.start_server(lambda reader, writer: Connection(chaos, reader, writer).run(), "127.0.0.1", listen, limit=1 << 20)
    admins = await asyncio.start_server(lambda reader, writer: _administrate(chaos, reader, writer), "127.0.0.1", admin)
    await asyncio.gather(clients.serve_forever(), admins.serve_forever())


if __name__ == "__main__":
    asyncio.run(main())
