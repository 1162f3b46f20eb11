"""Runs a program that talks to a Hub of tests/hub: with_hub.py URL recipe/train.py FLAGS. The token is HUB_TOKEN.

huggingface_hub reads HF_ENDPOINT when it is imported, which the server that tests fork processes from has done. The
environment is for processes that the program starts.
"""

import os
import runpy
import sys

import huggingface_hub.constants as constants

sys.argv.pop(0)
constants.ENDPOINT = sys.argv.pop(0)
constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = False, True
os.environ |= {"HF_ENDPOINT": constants.ENDPOINT, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
os.environ["HF_TOKEN"] = os.environ.get("HUB_TOKEN", "")
os.environ["HF_HUB_DOWNLOAD_TIMEOUT"] = "2"  # seconds without a byte
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
