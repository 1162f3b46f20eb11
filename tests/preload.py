"""What the forkserver of tests/processes.py loads before the first program starts: libraries, and the tokenizer, whose
tables take longer to read than a tiny run to train."""

import gc
from contextlib import suppress

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401

import eval.common  # noqa: F401
import recipe.hub.export
import recipe.train  # noqa: F401
import tests.processes  # noqa: F401
from recipe.data import tokenizer

with suppress(ModuleNotFoundError):  # a lent GPU's Python may lack it
    import datasets  # noqa: F401

tokenizer.encoding()
gc.freeze()  # a forked program's garbage collector then leaves these objects, and their pages, alone
