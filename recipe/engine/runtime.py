"""Runtime: the processes that train together, how they share the work, and what they agree on between two steps."""

import torch

from recipe.engine.shutdown import Agreement, StopSignal
from recipe.utils.processes import Processes
from recipe.utils.units import plural

_METHODS = {"": "DDP", "fsdp": "FSDP"}  # and zero1 to zero3


class Runtime:
    """The processes of a run: `processes`, this one among them; `sharding`, what they divide, zero1, zero2, zero3, fsdp
    or empty; `method` and `how`, in words, how they share the work; `optimizers`, the values of `optim` that they can
    run, if not any; `no_compile`, why torch.compile is ignored; `stop`, the signals that this process has received;
    `agreement`, what they decide between two steps."""

    def __init__(
        self, processes: Processes, sharding: str = "", *, how: str | None = None, optimizers: tuple[str, ...] = ()
    ):
        """`how` is worked out from the sharding unless it is given."""
        self.processes, self.sharding = processes, sharding
        self.method = _METHODS.get(sharding) or f"ZeRO-{sharding[-1]}"
        alone = processes.world_size == 1 and not sharding
        here = "" if alone else f"{self.method} over {plural(processes.world_size, 'process', 'es')}"
        self.how = here if how is None else how
        self.optimizers, self.no_compile = optimizers, ""
        if sharding == "zero3":  # Muon cannot be told there which part of a matrix a process has
            self.optimizers = ("adamw",)
            self.no_compile = "ZeRO-3 gathers weights while the model runs, which torch.compile cannot follow"
        self.stop = StopSignal()
        self.agreement = Agreement(self.stop, processes.hosts)

    def close(self) -> None:
        """Leaves the process group. A collective call."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
