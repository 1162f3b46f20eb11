"""DeepSpeed ZeRO 1, 2 and 3 as a strategy; imported only if the launch asks for DeepSpeed.

ds_configs/*.json decides how to shard. Everything else in DeepSpeed's configuration (batch, accumulation, clipping,
precision) is set from the recipe before it starts; accumulation and clipping are read back and checked.
"""

import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.optim import Optimizer

from recipe.config import ROOT, BatchPlan
from recipe.engine import hardware
from recipe.engine.device import local_device
from recipe.engine.launch import wants
from recipe.engine.runtime import Runtime
from recipe.engine.strategy import START_TIMEOUT, Strategy, processes_of, set_timeouts, start_accelerator
from recipe.optim.optimizer import by_parameter, muon_parameters
from recipe.utils.errors import UserError, reading

_CONFIG_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


class ZeroStrategy(Strategy):
    """ZeRO-1, 2 or 3, on GPUs or on CPU processes."""

    @classmethod
    def open(cls, precision: str) -> Strategy:
        """As Strategy's."""
        cpu = _prepare_environment()
        sharding = f"zero{zero_stage()}"
        precision = hardware.resolve_precision(precision, cpu=cpu)
        handlers = [InitProcessGroupKwargs(timeout=START_TIMEOUT, **({"backend": "gloo"} if cpu else {}))]
        # DeepSpeed takes the precision from its own configuration, which `_wrap` completes.
        accelerator = start_accelerator(precision, "no", handlers, (DistributedType.DEEPSPEED,))
        runtime = Runtime(processes_of(accelerator, START_TIMEOUT), sharding)
        set_timeouts()
        device = local_device(accelerator.device, precision, runtime.processes)
        return cls(device, runtime, accelerator)

    def _wrap(self, model: nn.Module, optimizer: Optimizer, batch: BatchPlan):
        config = self._accelerator.state.deepspeed_plugin.deepspeed_config
        config |= settings_of(batch, self._max_grad_norm, self.device.precision)
        if self.device.precision == "fp16":
            fp32_weights = {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}
        self._accelerator.gradient_accumulation_steps = batch.accumulation  # or it warns that DeepSpeed's differs
        try:
            engine, optimizer = self._accelerator.prepare(model, optimizer)
        except ValueError as error:  # a field of another name, or "auto" where DeepSpeed has no default
            raise UserError(f"{os.environ[_CONFIG_FILE]} is not accepted: {' '.join(str(error).split())}") from error
        assert engine.gradient_accumulation_steps() == batch.accumulation
        assert engine.gradient_clipping() == self._max_grad_norm
        # DeepSpeed's groups have their backend's default timeout, and NCCL's is shorter than a checkpoint may take.
        set_timeouts()
        self._zero = _Internals(engine)
        if self.runtime.sharding != "zero3":
            self._zero.set_muon_layout(optimizer)
        if self.device.precision == "fp16":
            # A run that keeps overflowing is ended by the spike filter, with an error that explains it.
            self._zero.optimizer.loss_scaler.raise_error_at_min_scale = False
            for name, p in model.named_parameters():  # DeepSpeed has made its fp32 weights from fp16 ones
                self._zero.set(p, fp32_weights[name])
        return engine, optimizer

    def release(self) -> None:
        """As Strategy's."""
        vars(self).pop("_zero", None)  # missing if nothing was trained
        super().release()

    @contextmanager
    def micro_step(self, model: nn.Module, *, last: bool) -> Generator[None, None, None]:
        """Tells DeepSpeed whether this micro-step ends the step."""
        self._zero.engine.set_gradient_accumulation_boundary(last)
        yield
        if not last:
            self._zero.engine.step()  # only counts the micro-step; `update` calls it for the last one

    def backward(self, loss: Tensor) -> None:
        """As Strategy's; DeepSpeed accumulates the gradients, and averages them in the last micro-step."""
        self._zero.engine.backward(loss, scale_wrt_gas=False)  # the loop has already divided by the accumulation

    def update(self, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> tuple[Tensor, Tensor]:
        """As Strategy's. DeepSpeed's step clips, skips if the norm is not finite, updates and clears the gradients."""
        self._zero.engine.step()
        norm = self._zero.engine.get_global_grad_norm()
        grad_norm = torch.as_tensor(norm, dtype=torch.float32, device=self.device.torch_device)
        return grad_norm, self._should_skip(grad_norm, loss)

    @torch.no_grad()
    def gather(self, model: nn.Module, optimizer: Optimizer) -> tuple[dict, dict]:
        """As Strategy's. A collective call."""
        weights, state = {}, {}
        if optimizer.state:  # there is none before the first step
            self._zero.link()
        state_keys = self._zero.state_keys()
        for name, p in model.named_parameters():
            for key, copies in ({"": weights} | dict.fromkeys(state_keys[p], state)).items():
                full = self._zero.get(p, key)  # one at a time is on the device
                if self.runtime.processes.is_main:
                    copies[f"{key}.{name}" if key else name] = full.to("cpu", copy=True)
        return weights, state

    def scatter(self, model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], steps: int) -> None:
        """As Strategy's; each process keeps its shard."""
        if tensors:
            saved_states = by_parameter(tensors)
            states = {p: saved_states[name] for name, p in model.named_parameters()}
            self._zero.make_state(states, steps)
            for p, state in states.items():
                for key, tensor in state.items():
                    self._zero.set(p, tensor, key)

    def unsharded_weights(self, model: nn.Module) -> dict[str, Tensor] | None:
        """As Strategy's: not None under ZeRO-3 only. A collective call."""
        if self.runtime.sharding != "zero3":
            return None
        return {name: self._zero.get(p) for name, p in model.named_parameters()}

    @property
    def grad_scaler(self):
        """As Strategy's, with DeepSpeed's own loss scale."""
        fp16 = self.device.precision == "fp16"
        return _LossScale(self._zero.optimizer.loss_scaler) if fp16 else super().grad_scaler


def settings_of(batch: BatchPlan, max_grad_norm: float, precision: str) -> dict:
    """The settings that the recipe adds to DeepSpeed's configuration, whose file decides how to shard."""
    settings = {
        "train_batch_size": batch.sequences,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": max_grad_norm,
        # They would wait for the GPU in every micro-step, inside the compiled model, which torch 2.13 cannot trace.
        "timers": {"throughput": {"enabled": False}},
    }
    if precision == "bf16":
        # torch's autocast over fp32 weights: DeepSpeed's own bf16 would keep, and save, bf16 weights.
        # The modules whose gradients may be reduced in bf16; DeepSpeed's own list has torch's layers only.
        modules = ["torch.nn.Linear", "recipe.model.gpt2.Conv1D"]
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": modules}
    if precision == "fp16":
        # torch_autocast in float16 cannot be combined with clipping (deepspeed 0.19). The scale starts and grows as in
        # torch's GradScaler.
        scale = {"initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1, "min_loss_scale": 1}
        settings["fp16"] = {"enabled": True, "loss_scale": 0} | scale
    return settings


class _LossScale:
    """DeepSpeed's loss scale, with the state of torch's GradScaler.

    Before the scale grows for the first time, DeepSpeed takes one finite step more than torch, and afterwards as many.
    So its growth tracker lags torch's by one, and is -1 before the first finite step.
    """

    def __init__(self, scaler):
        self._scaler = scaler

    def state_dict(self) -> dict:
        scaler = self._scaler
        finite_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
        return {
            "scale": float(scaler.cur_scale),
            "growth_factor": scaler.scale_factor,
            "backoff_factor": 1 / scaler.scale_factor,
            "growth_interval": scaler.scale_window,
            "_growth_tracker": (finite_steps - 1) % scaler.scale_window if finite_steps else -1,
        }

    def load_state_dict(self, state: dict) -> None:
        scaler = self._scaler
        scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = state["scale"], state["_growth_tracker"] + 1, -1


def _prepare_environment() -> bool:
    """Sets the environment variables that DeepSpeed needs; returns whether to run on the CPU. Raises UserError for a
    launch that would not train what the recipe describes."""
    if "LOCAL_RANK" not in os.environ:
        raise UserError("start DeepSpeed with accelerate launch --config_file accelerate_configs/zero1.yaml")
    cpu = wants("CPU")
    if cpu == torch.cuda.is_available():
        raise UserError(
            f"{'a' if cpu else 'no'} GPU was found; for ZeRO on the CPU put ACCELERATE_USE_CPU=true "
            "CUDA_VISIBLE_DEVICES= before the launch"
        )
    os.environ.pop("ACCELERATE_USE_CPU", None)  # with it Accelerate would silently ignore DeepSpeed
    if cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it warns that it found no accelerator
        import deepspeed.ops

        # Otherwise it looks for compilers, and spends a minute compiling an operator that only inference calls.
        deepspeed.ops.__compatible_ops__ = {}
    return cpu


def zero_stage() -> int:
    """The ZeRO stage of the launch. Raises UserError if a file cannot be read, or sets more than sharding."""
    if not (name := os.environ.get(_CONFIG_FILE)):
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        raise UserError(
            f"the launch names no deepspeed_config_file; start from accelerate_configs/zero{stage}.yaml, or name "
            f"ds_configs/zero{stage}.json in your own Accelerate file, in place of its other DeepSpeed settings; "
            "offloading is not supported"
        )
    if not (file := Path(name)).is_file():  # launched from another directory
        os.environ[_CONFIG_FILE] = str(file := ROOT / file)
    fields = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    if extra := [name for name in fields if name and not name.startswith(("deepspeed_", "zero3_init"))]:
        raise UserError(
            f"the Accelerate file sets {', '.join(extra)} beside deepspeed_config_file; remove it: {file} decides "
            "the sharding, and the recipe precision, accumulation and clipping"
        )
    with reading(file, "the Accelerate file names it as deepspeed_config_file; ds_configs/ has examples"):
        config = json.loads(file.read_bytes())
        zero = config.pop("zero_optimization")
        stage = zero["stage"]
    extra = [key for key, value in config.items() if value != "auto" and key != "steps_per_print"]
    # With them Accelerate would replace the optimizer, Muon too, by Adam.
    extra += [f"zero_optimization.{key}" for key in ("offload_optimizer", "offload_param") if zero.get(key)]
    if extra:
        raise UserError(f"{file}: remove {', '.join(extra)}; it may only set how to shard, without offloading")
    if type(stage) is not int or stage not in (1, 2, 3):
        raise UserError(f"{file}: zero_optimization.stage is {stage!r}; write a number: 1, 2 or 3")
    return stage


class _Internals:
    """All access to private names of DeepSpeed: reads and writes the full fp32 tensors of a sharded parameter.

    The public functions are not enough (docs/log.md, "One recipe on every engine"). If a new version moves any of these
    names, test_sharded_state_is_exact_and_skipped_steps_change_nothing fails.
    """

    def __init__(self, engine):
        import deepspeed.utils

        self.engine, self.optimizer, self.api = engine, engine.optimizer, deepspeed.utils
        self.stage = engine.zero_optimization_stage()

    def _groups(self) -> Iterator[tuple[Tensor, list[nn.Parameter]]]:
        """Each group's flat tensor of this process's fp32 weights, the key of its optimizer state, and parameters."""
        zero = self.optimizer
        if self.stage == 3:
            return zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
        return zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True)

    def state_keys(self) -> dict[nn.Parameter, list[str]]:
        """The names of the state that the optimizer has for each element of a parameter; none before the first step."""
        keys = {}
        for flat, parameters in self._groups():
            state = self.optimizer.optimizer.state.get(flat, {})
            flat_keys = [key for key, value in state.items() if getattr(value, "shape", None) == flat.shape]
            keys |= dict.fromkeys(parameters, flat_keys)
        return keys

    def make_state(self, keys: Mapping[nn.Parameter, Iterable[str]], steps: int) -> None:
        """Creates the optimizer state after `steps` steps, with zeros under each parameter's `keys`."""
        optimizer = self.optimizer.optimizer
        muon_ids = {id(flat) for flat in muon_parameters(optimizer)}
        for flat, parameters in self._groups():
            optimizer.state[flat] = state = {key: torch.zeros_like(flat) for key in keys[parameters[0]]}
            if id(flat) not in muon_ids:
                state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=flat.device)
        self.link()

    def set_muon_layout(self, optimizer: Optimizer) -> None:
        """Tells Muon which elements of each parameter this process's flat tensors hold (see Muon)."""
        for group, parameters in zip(optimizer.param_groups, self.optimizer.bit16_groups, strict=True):
            if group.get("muon"):
                group["layout"] = [self._fragment(p) for p in parameters]

    @staticmethod
    def _fragment(p: torch.nn.Parameter) -> tuple[tuple[int, ...], int, int, int]:
        """(shape, start in the flattened parameter, start in this process's flat tensor, length)."""
        mapping = getattr(p, "_hp_mapping", None)
        if mapping is None:  # all of it is on other processes
            return tuple(p.shape), 0, 0, 0
        in_parameter, in_flat = mapping.lp_fragment_address, mapping.hp_fragment_address
        return tuple(p.shape), in_parameter.start, in_flat.start, in_flat.numel

    def link(self) -> None:
        """Links parameters to the optimizer state of every group. Call it before the state is read."""
        if self.stage < 3:
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def get(self, p: torch.nn.Parameter, key: str = "") -> Tensor:
        """The full fp32 weight (key "") or optimizer state of `p`, on every process. A collective call."""
        return self.api.safe_get_full_optimizer_state(p, key) if key else self.api.safe_get_full_fp32_param(p)

    def set(self, p: torch.nn.Parameter, full: Tensor, key: str = "") -> None:
        """Sets this process's part of the fp32 weight (key "") or optimizer state of `p` from the full tensor."""
        value, set_weight, set_state = full, self.api.safe_set_full_fp32_param, self.api.safe_set_full_optimizer_state
        if self.stage == 3:
            numel = p.partition_numel()  # ty: ignore[missing-attribute] # DeepSpeed puts it there
            padded = torch.nn.functional.pad(full.flatten(), (0, numel * self.engine.dp_world_size - full.numel()))
            value = padded.narrow(0, numel * torch.distributed.get_rank(), numel)
            set_weight, set_state = self.api.safe_set_local_fp32_param, self.api.safe_set_local_optimizer_state
        if key:
            set_state(p, value, key)
        else:
            set_weight(p, value)
