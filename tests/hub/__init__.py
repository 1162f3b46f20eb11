"""A local Hugging Face Hub (server.py), and the tests of recipe/hub."""

from tests.hub.server import Fault, Hub

TOKEN = "hf_canary_of_the_tests"
REPO = "acme/gpt2"

__all__ = ["REPO", "TOKEN", "Fault", "Hub"]
