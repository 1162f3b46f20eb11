"""Opens the engine that the launch asked for."""

import os

from accelerate.utils import is_torch_xla_available

from recipe.engine.base import Engine
from recipe.engine.device import set_up_allocator, use_deterministic_algorithms
from recipe.engine.launch import check_launch, wants_deepspeed, wants_fsdp


def open_engine(precision: str = "auto", planned: str = "", *, deterministic: bool = False) -> Engine:
    """The engine of this process: XLA, DeepSpeed or FSDP where the launch chose it, else one device or DDP; or one that
    stands for the devices `planned`. `deterministic`: on a GPU too; on a CPU it always is. A collective call. Raises
    UserError for a launch that would not train what the recipe describes."""
    if planned:
        from recipe.engine.planned import PlannedEngine

        return PlannedEngine(precision, planned)
    set_up_allocator()
    if deterministic:
        use_deterministic_algorithms()
    check_launch()
    if wants_deepspeed():
        from recipe.engine.deepspeed import ZeroEngine as engine
    elif wants_fsdp():
        from recipe.engine.fsdp import FsdpEngine as engine
    elif is_torch_xla_available():
        # Kaggle's images set this to "local", which libtpu takes for a host's name and waits for.
        if os.environ.get("TPU_PROCESS_ADDRESSES") == "local":
            del os.environ["TPU_PROCESS_ADDRESSES"]
        from recipe.engine.xla import XlaEngine as engine
    else:
        engine = Engine
    return engine(precision)
