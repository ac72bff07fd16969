"""Probe that measures a network from inside its hosts. It is run by path, so that it starts in a few milliseconds.

`probe.py serve PORT` accepts TCP (first byte: `u` receives and reports, `d` sends until closed) and echoes UDP, until
it is killed. `probe.py ask JSON` makes one measurement against such a server and prints one JSON document.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

CHUNK = bytes(1 << 17)
STEP_TIMEOUT = 30.0


def serve(port: int) -> None:
    """Serve forever. Prints `ready` when it listens."""
    listener = socket.create_server(("", port), backlog=64)
    echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    echo.bind(("", port))
    threading.Thread(target=_echo, args=(echo,), daemon=True).start()
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve_one, args=(connection,), daemon=True).start()


def _raise_priority() -> None:
    """Raise the priority of this thread and those it starts, so that waiting for a CPU does not falsify results."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _echo(echo: socket.socket) -> None:
    _raise_priority()
    while True:
        data, sender = echo.recvfrom(2048)
        echo.sendto(data, sender)


def _serve_one(connection: socket.socket) -> None:
    with connection:
        connection.settimeout(STEP_TIMEOUT)
        try:
            if connection.recv(1) == b"d":
                while True:
                    connection.sendall(CHUNK)
            else:
                _, warm_up = connection.recv(1), float(connection.recv(16))
                connection.sendall(json.dumps(_receive_for(connection, warm_up, STEP_TIMEOUT)).encode())
        except OSError:
            return


def _receive_for(connection: socket.socket, warm_up: float, seconds: float) -> dict[str, Any]:
    """Receive until the end, or for `seconds` after the warm-up. The rate excludes the warm-up."""
    start = time.monotonic()
    total = counted = 0
    since = last = start
    while last - start < warm_up + seconds:
        received = len(connection.recv(1 << 18))
        if not received:
            break
        last = time.monotonic()
        total += received
        if last - start < warm_up:
            since = last
        else:
            counted += received
    return {"mbit": counted * 8e-6 / max(1e-9, last - since), "bytes": total, "seconds": last - since}


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """Make the measurement that `task` names."""
    place = request["address"], request["port"]
    if request["task"] == "ping":
        return _ping(place, request["count"], request["interval"])
    if request["task"] == "call":
        return _call(place, request["seconds"])
    with socket.create_connection(place, timeout=STEP_TIMEOUT) as connection:
        congestion = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
        if request["task"] == "download":
            connection.sendall(b"d")
            measured = _receive_for(connection, request["warm_up"], request["seconds"])
        else:
            connection.sendall(b"u" + b"%17.6f" % request["warm_up"])
            measured = _send_for(connection, request["warm_up"] + request["seconds"])
    return {**measured, "congestion": congestion}


def _send_for(connection: socket.socket, seconds: float) -> dict[str, Any]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(CHUNK)
    connection.shutdown(socket.SHUT_WR)
    answer = b""
    while received := connection.recv(4096):
        answer += received
    measured: dict[str, Any] = json.loads(answer)
    return measured


def _ping(place: tuple[str, int], count: int, interval: float) -> dict[str, Any]:
    """Measure round trips of small datagrams in ms, and count the lost ones."""
    _raise_priority()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect(place)
        sent: dict[int, float] = {}
        trips: list[float] = []
        reader = threading.Thread(target=_read_echoes, args=(sender, sent, trips, count))
        reader.start()
        for number in range(count):
            sent[number] = time.perf_counter()
            sender.send(number.to_bytes(4, "big"))
            time.sleep(interval)
        reader.join()
    return {"trips_ms": sorted(trips), "lost": count - len(trips)}


def _read_echoes(sender: socket.socket, sent: dict[int, float], trips: list[float], count: int) -> None:
    sender.settimeout(2.0)
    while len(trips) < count:
        try:
            number = int.from_bytes(sender.recv(64), "big")
        except TimeoutError:
            return
        except OSError:
            continue
        trips.append((time.perf_counter() - sent[number]) * 1000)


def _call(place: tuple[str, int], seconds: float) -> dict[str, Any]:
    """Test whether a connection can be opened."""
    try:
        socket.create_connection(place, timeout=seconds).close()
    except OSError as error:
        return {"connected": False, "why": str(error)}
    return {"connected": True}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        print(json.dumps(ask(json.loads(sys.argv[2]))))
