"""Chooses the address at which a trainer listens for the engines that it publishes to.

On one host this is the loopback address, which no other host can reach. If the engines may be on other hosts, it is
the address of Ray's node, or of the interface that leads to the engine's server. `socket.gethostbyname` of the host's
own name is no choice, because Debian's /etc/hosts gives it the address 127.0.1.1.
"""

from __future__ import annotations

import socket
import sys

from qarl.errors import UserError

LOOPBACK = "127.0.0.1"


def own_address(peer: str | None = None) -> str:
    """Return the address of this host for receivers.

    `peer`: name or address of the engine's host. If it is None, the receivers are in this process's Ray cluster, or on
    this host if there is none.

    Raises:
        UserError: `peer` has no IPv4 address that this host can reach.
    """
    if peer is not None:
        return _towards(peer)
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return LOOPBACK
    hosts = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return LOOPBACK if len(hosts) < 2 else str(ray.util.get_node_ip_address())


def _towards(peer: str) -> str:
    """Return the address of the interface that packets to `peer` leave by. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError as error:
            raise UserError(
                f"the trainer cannot find its own address for the engine at {peer}",
                why=f"{type(error).__name__}: {error}",
                fix="set `host` to an address of this host that the engine can reach",
            ) from error
        return str(probe.getsockname()[0])
