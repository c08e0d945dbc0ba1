"""The trainer's address: loopback on one host, and otherwise one that the engine's host can reach."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from qarl.errors import UserError
from qarl.rollout.publish.sockets import LOOPBACK, own_address


def node(address: str, alive: bool = True) -> dict[str, Any]:
    return {"NodeManagerAddress": address, "Alive": alive}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (None, LOOPBACK),
        ([node("10.0.0.1")], LOOPBACK),
        ([node("10.0.0.1"), node("10.0.0.1")], LOOPBACK),
        ([node("10.0.0.1"), node("10.0.0.2", alive=False)], LOOPBACK),
        ([node("10.0.0.1"), node("10.0.0.2")], "10.0.0.1"),
    ],
    ids=["no Ray", "one host", "two nodes of one host", "the other host is gone", "two hosts"],
)
def test_in_a_ray_cluster(monkeypatch, nodes, expected):
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    ray = SimpleNamespace(is_initialized=lambda: nodes is not None, nodes=lambda: nodes, util=util)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert own_address() == expected


def test_without_ray(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert own_address() == LOOPBACK and "ray" not in sys.modules


def test_towards_a_server():
    """Loopback for a server of this host. For another host, an address of this host at which one can listen."""
    assert own_address("localhost") == own_address("127.0.0.1") == LOOPBACK
    try:
        found = own_address("192.0.2.1")  # reserved for documentation; nothing is sent
    except UserError:
        pytest.skip("this machine has no route to other hosts")
    assert found != LOOPBACK and found != "192.0.2.1"
    socket.create_server((found, 0)).close()
    with pytest.raises(UserError, match="cannot find an address of this host that the engine at no-such-host"):
        own_address("no-such-host.invalid")
