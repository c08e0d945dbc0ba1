"""Chooses the address at which a trainer listens for the engines that it publishes to.

If all engines are on this host, this is the loopback address, which other hosts cannot reach. Otherwise it is the
address of Ray's node, or of the network interface that leads to the engine's server. `socket.gethostbyname` of the
host's own name would not work, because Debian's /etc/hosts maps this name to 127.0.1.1.
"""

from __future__ import annotations

import socket
import sys

from qarl.errors import UserError

LOOPBACK = "127.0.0.1"


def own_address(peer: str | None = None) -> str:
    """Return the address of this host to which receivers connect.

    `peer`: name or address of the engine's host. If it is None, the receivers are in this process's Ray cluster, or, if
    there is no cluster, on this host.

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
    """Return the address of the network interface that this host uses for packets to `peer`. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError as error:
            raise UserError(
                f"the trainer cannot find an address of this host that the engine at {peer} can reach",
                why=f"{type(error).__name__}: {error}",
                fix="set `host` to an address of this host that the engine can reach",
            ) from error
        return str(probe.getsockname()[0])
