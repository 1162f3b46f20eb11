"""GPT-2 pre-training recipe: text -> shards -> checkpoints that `transformers` loads."""

import os

__version__ = "0.3.0.dev0"

# At 1, which torch_xla sets, its partitioner announces its retirement at every program that it compiles.
if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
