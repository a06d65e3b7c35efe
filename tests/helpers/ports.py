"""TCP ports for tests that start a server: free ones that stay free until it is there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Give a port that the system hands out to nobody else while the block runs.

    The socket that holds it does not listen: who connects is refused, and a server that sets
    SO_REUSEADDR, as the store of torch does, can take the port.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
