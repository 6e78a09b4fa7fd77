"""`python tests/tiny_supervisor.py MODE`: a supervisor whose workers say who they are, and hold connections open."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from functools import partial

from unmask.serve import workers
from unmask.serve._listening import bind_socket, shown_url


def work(mode: str, seat: workers.WorkerSeat) -> None:
    if mode == "fails":
        sys.exit(7)
    if mode == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "fails-later" and seat.index == 1:
        sys.exit(9)
    if mode == "slow" and seat.index == 1:
        time.sleep(60)
    told = json.dumps(seat.measured)
    seat.measured["by"] = str(seat.index)
    seat.channel.sendall(b"up\nready " + json.dumps(seat.measured).encode() + b"\n")
    if mode == "slow":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    held = []
    while True:
        data, descriptors, _, _ = socket.recv_fds(seat.channel, 1, 1)
        if not data:
            return
        seat.channel.sendall(b"taken 1\n")
        connection = socket.socket(fileno=descriptors[0])
        connection.sendall(f"{seat.index} {os.getpid()} {told}\n".encode())
        held.append(connection)
        if mode == "gets-stuck" and seat.index == 0 and len(held) == 3:
            seat.channel.sendall(b"stuck\n")


def main() -> None:
    workers._CLOSING_SECONDS = 0.5
    listener = bind_socket("127.0.0.1", 0)
    print(shown_url("127.0.0.1", listener), file=sys.stderr, flush=True)

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    sys.exit(workers.Supervisor(partial(work, sys.argv[1]), 2, listener, 0.2, log).run())


if __name__ == "__main__":
    main()
