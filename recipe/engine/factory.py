"""Opens the strategy that the launch asks for, or describes that of other devices for a dry run."""

import os

from accelerate.utils import is_torch_xla_available

from recipe.engine import hardware
from recipe.engine.device import planned_device
from recipe.engine.launch import check_launch, has_torch_tpu, wants, wants_tpu
from recipe.engine.runtime import XLA_COMPILES, Runtime
from recipe.engine.strategy import Strategy
from recipe.utils.errors import UserError
from recipe.utils.processes import Processes


def open_strategy(precision: str = "auto", planned: str = "", *, deterministic: bool = False) -> Strategy:
    """The strategy of this process: XLA, DeepSpeed or FSDP if the launch asks for it, else one device or DDP; or one
    that describes the devices `planned`. `deterministic`: on a GPU too; a CPU always is. A collective call. Raises
    UserError for a launch that would not train what the recipe describes."""
    if planned:
        return _planned_strategy(precision, planned)
    hardware.set_up_allocator()
    if deterministic:
        hardware.use_deterministic_algorithms()
    check_launch()
    # Kaggle's images set this to "local", which libtpu takes for the name of a host, for which it waits.
    if os.environ.get("TPU_PROCESS_ADDRESSES") == "local":
        del os.environ["TPU_PROCESS_ADDRESSES"]
    if wants("DEEPSPEED"):
        from recipe.engine.deepspeed import ZeroStrategy as strategy_class
    elif wants_tpu() and has_torch_tpu():
        from recipe.engine.tpu import TpuStrategy as strategy_class
    elif wants("FSDP"):
        from recipe.engine.fsdp import FsdpStrategy as strategy_class
    elif is_torch_xla_available():
        from recipe.engine.xla import XlaStrategy as strategy_class
    else:
        strategy_class = Strategy
    strategy = strategy_class.open(precision)
    strategy.runtime.stop.listen()
    return strategy


def _planned_strategy(precision: str, devices: str) -> Strategy:
    """Describes the strategy on `devices` (as in dry_run), sharded as the launch asks. Every process of the launch does
    the dry run, and the first one prints it. Raises UserError for unknown devices, and if they lack the precision or
    cannot train that way."""
    count, name, memory = hardware.named_devices(devices)
    rank, sharding = int(os.environ.get("RANK", 0)), ""
    if wants("FSDP"):
        from recipe.engine.fsdp import take_settings

        sharding = "fsdp"
        take_settings(planned_device(name, precision).precision)
    elif wants("DEEPSPEED"):
        from recipe.engine.deepspeed import zero_stage

        sharding = f"zero{zero_stage()}"
    runtime = Runtime(Processes(rank, count, rank, min(count, 8), is_main=rank == 0), sharding)
    if name in ("TPU V2", "TPU V3"):  # run by torch_xla: one process drives all of them
        how = f"{count} devices behind one process" if count > 1 else ""
        runtime = Runtime(Processes(rank, is_main=rank == 0), how=how, no_compile=XLA_COMPILES)
    device = planned_device(name, precision, count // runtime.processes.world_size, memory)
    if sharding and device.type != "cuda" and (device.type, sharding) != ("tpu", "fsdp"):
        file = {"tpu": "tpu-fsdp", "xla": "tpu"}.get(device.type, "single")
        raise UserError(f"{sharding} does not run on {name}; launch with accelerate_configs/{file}.yaml")
    if count > 1 and device.type == "mps":
        raise UserError(f"{devices}: Apple's chips cannot train together; plan for one of them")
    return Strategy(device, runtime)
