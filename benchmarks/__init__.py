"""Measures the speed of the training step: one optimization after the other, and beside its peers."""

import sys
from importlib.util import find_spec

# A GPU may be lent without a network, with whatever Python there is.
_NEEDED = "torch transformers accelerate safetensors huggingface_hub tiktoken filelock numpy psutil yaml tqdm"

if _lacks := [name for name in _NEEDED.split() if not find_spec(name)]:
    sys.exit(f"error: {sys.executable} lacks {', '.join(_lacks)}; use a Python that has them (make PYTHON=...)")
