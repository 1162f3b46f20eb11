"""A Hugging Face Hub on this machine (server.py reads, push_server.py writes), and the tests of recipe/hub."""

from tests.hub.server import Fault, Hub

__all__ = ["Fault", "Hub"]
