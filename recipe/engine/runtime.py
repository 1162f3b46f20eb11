"""Runtime: the processes of a run, how they share the work, and what they agree on between two steps."""

import torch

from recipe.data.prefetch import BatchLoader
from recipe.engine.shutdown import DECAY, POLL_S, STOP, Interrupted, StopSignal
from recipe.utils.processes import Processes
from recipe.utils.units import plural

XLA_COMPILES = "XLA itself compiles full steps"


class Runtime:
    """The processes of a run and how they work together.

    Attributes:
        processes: this process among all of them.
        sharding: zero1, zero2, zero3, fsdp or empty.
        method: the family of engines, also for one device: DDP, FSDP or ZeRO-1.
        how: how they share the work, to print: "DDP over 8 processes".
        optimizers: the only supported values of `optim`; empty if all are supported.
        no_compile: why torch.compile is ignored; empty if it is not.
        stop: the signals that this process has received.
        decay_due: after Interrupted, whether it was the clock of train_hours that stopped the run, and no signal.
    """

    def __init__(
        self,
        processes: Processes,
        sharding: str = "",
        *,
        how: str | None = None,
        optimizers: tuple[str, ...] = (),
        no_compile: str = "",
    ):
        """By default `how` follows from the sharding and the number of processes."""
        self.processes, self.sharding = processes, sharding
        self.method = {"": "DDP", "fsdp": "FSDP"}.get(sharding) or f"ZeRO-{sharding[-1]}"
        if how is None:
            is_single = processes.world_size == 1 and not sharding
            how = "" if is_single else f"{self.method} over {plural(processes.world_size, 'process', 'es')}"
        self.how = how
        self.optimizers, self.no_compile = optimizers, no_compile
        if sharding == "zero3":  # DeepSpeed does not show there which elements of a matrix a process has, for Muon
            self.optimizers = ("adamw",)
            self.no_compile = "ZeRO-3 gathers weights while the model runs, which torch.compile cannot trace"
        self.stop, self.decay_due = StopSignal(), False

    def check_stop(self) -> None:
        """Raises Interrupted on all processes if any has been asked to stop. A collective call."""
        self._agree(late=False)

    def wait_for_batches(self, batches: BatchLoader) -> None:
        """Returns once every process has the data of the next step: no process starts a step that another cannot
        finish. Raises Interrupted on all processes, also if one of them cannot read its data. A collective call."""
        while self._agree(late=not batches.ready(POLL_S), failed=batches.error() is not None):
            pass
        StopSignal.stepping = True

    def _agree(self, *, late: bool, failed: bool = False) -> bool:
        """Whether any process is `late`. Raises Interrupted on all if one asks to stop, or has `failed`."""
        asked = self.stop.heartbeat()
        flags = torch.tensor([STOP if failed else asked, late], dtype=torch.int32)
        if self.processes.cpu_group is not None:
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=self.processes.cpu_group)
        asked, late = flags.tolist()
        self.decay_due = asked == DECAY
        if asked:
            raise Interrupted
        return bool(late)

    def close(self) -> None:
        """Waits for all processes, because the launcher kills the others 30 s after the first to end with a code such
        as RUN_AGAIN, and leaves the process group. A collective call."""
        self.processes.anywhere(False)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
