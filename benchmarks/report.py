"""Results: the conditions of a measurement, and JSON files."""

import json
import platform
import shlex
import sys
from datetime import date
from pathlib import Path

import torch

from recipe.checkpoint.provenance import versions
from recipe.config import Config
from recipe.engine import hardware
from recipe.estimate.memory import flops_per_token, parameter_count

FLOPS_FORMULA = "6 N + 12 L D T per token (PaLM, appendix B), N without position embeddings, unpadded vocabulary"


def circumstances() -> dict:
    """The conditions of the measurement: device, versions, date and command."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else str(accelerator).upper()
    return {
        "device": gpu if accelerator else hardware.processor(),
        **versions(),
        "python": platform.python_version(),
        "threads": None if accelerator else torch.get_num_threads(),
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
    }


def measured_model(config: Config) -> dict:
    """The trained model, and its FLOPs per token by FLOPS_FORMULA."""
    m, length = config.model, config.data.sequence_length
    return {
        "model": {"recipe": Path(config.run.config).stem, "parameters": parameter_count(m), "n_layer": m.n_layer},
        "sequence_length": length,
        "flops_per_token": flops_per_token(m, length),
    }


def write(results: dict, path: Path) -> None:
    """Writes the results as JSON. Raises ValueError for a non-finite number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
