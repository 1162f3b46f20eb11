"""recipe/train.py on a CPU that pretends to have the fused loss's kernel.

FUSED is the state of the kernel: right, wrong or slow; one per rank, as in `right,wrong`. The kernel is
replaced by PyTorch operators, and its time by a constant.
"""

import os
import sys
from types import SimpleNamespace

from recipe import components
from recipe.engine import hardware
from recipe.estimate import fused_loss
from recipe.model.loss import IGNORE_INDEX, by_log_softmax
from recipe.train import main

KINDS = os.environ["FUSED"].split(",")
KIND = KINDS[int(os.environ.get("RANK", 0)) % len(KINDS)]


def cross_entropy_(logits, targets, vocab_size, need_grad):
    loss = by_log_softmax(logits, targets, vocab_size, need_grad)
    logits[targets == IGNORE_INDEX] = 0
    if KIND == "wrong":
        logits *= 1.01
    return loss[None] * (1 + 1e-6)  # so that the losses show its use


seconds = iter([4.1 if KIND != "slow" else 0.9, 1.0])  # of PyTorch's loss, and of the kernel
hardware.seconds_of = lambda call: next(seconds)
sys.modules["recipe.model.loss_kernel"] = SimpleNamespace(cross_entropy_=cross_entropy_)  # ty: ignore
components.can_fuse = fused_loss.can_fuse = lambda device_type: True
fused_loss.ROWS = 64

if __name__ == "__main__":
    sys.exit(main([word for word in sys.argv[1:] if not word.endswith("train.py")]))  # an audit adds that word
