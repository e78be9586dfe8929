"""A port of this machine that nobody listens at."""

import socket


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])
