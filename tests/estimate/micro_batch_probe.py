"""recipe/train.py on a device that pretends to have little memory: FIT_MEMORY bytes, 140e6, or those of each rank,
140e6,90e6."""

import os
import sys

from recipe.engine.device import Device
from recipe.train import main

BYTES = [int(float(part)) for part in os.environ["FIT_MEMORY"].split(",")]
Device.memory = property(lambda device: BYTES[int(os.environ.get("RANK", 0))], lambda device, value: None)

if __name__ == "__main__":
    sys.exit(main())
