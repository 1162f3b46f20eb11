"""Run by tests in several processes: steps of 10 ms, before each of which the processes agree, as the loop does.

Each process prints a line of JSON. Rank 1's data are late at step 5, and rank 1 is told to stop during step 20.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from recipe.engine.shutdown import Agreement, Interrupted

torch.distributed.init_process_group("gloo")
rank, step, waits = int(os.environ["RANK"]), 0, []
signal = SimpleNamespace(requested=False, stepping=False, at_boundary=lambda: None)
late = [3] if rank == 1 else [0]  # looks at the data of step 5 until they are there


def ready(seconds: float, ahead: int = 0) -> bool:
    if step + ahead == 5 and late[0]:
        late[0] -= 1
        time.sleep(seconds)
        return False
    return True


agreement = Agreement(signal, torch.distributed.group.WORLD)
batches = SimpleNamespace(ready=ready, error=lambda ahead=0: None)
try:
    while step < 1000:
        begin = time.perf_counter()
        agreement.wait_for_batches(batches)
        waits.append(time.perf_counter() - begin)
        assert not (step == 5 and late[0])
        if rank == 1 and step == 20:
            signal.requested = True
        time.sleep(0.01)
        step += 1
except Interrupted:
    pass
print(json.dumps({"steps": step, "median_wait": statistics.median(waits), "wait_of_step_5": waits[5]}), flush=True)
torch.distributed.destroy_process_group()
