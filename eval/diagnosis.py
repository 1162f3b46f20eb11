"""Does my loss look right? Findings about a run, from its reference curve and from checks that need none."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from eval.curves import REL_TOL, Reference, Run, find_reference
from recipe.utils.units import si

# Nats by which the first validation loss may lie below and above that of a uniform prediction, the logarithm of the
# vocabulary size (10.82 for GPT-2's). Known values: 10.81 to 10.83 (this project), 10.95 (build-nanogpt), 10.98 and
# 11.01 (llm.c).
INITIAL_LOSS_MARGINS = (0.3, 0.5)
# By step 200 the loss of every known healthy run has fallen by more than 3 nats; less than 2 is reported.
LEARNING_STEP, LEARNING_DROP = 200, 2.0
# The validation loss is always measured on the same tokens, so a rise is not batch noise. At a high learning rate it
# still fluctuates by about 0.02 (llm.c's and build-nanogpt's curves never rise by more than 0.002).
MAX_RISE = 0.03
# Nats by which the median training loss of a run's last tenth may lie above that of another: far more than its noise.
MAX_TRAINING_RISE = 0.5
MIN_LINES = 50  # of training losses, so that a tenth of them has a median; of two, it is as noisy as a batch
# Fraction of the tokens by which a curve may be ahead of or behind its reference.
TOKEN_SHIFT = 0.1
# Up to this many skipped steps are only worth a note: fp16's loss scale starts at 65,536 and is halved at each.
MAX_SKIPPED = 10


@dataclass(frozen=True)
class Finding:
    """A sentence about a run; kind is good, bad or note."""

    kind: str
    text: str


def diagnose(run: Run, references: list[Reference]) -> list[Finding]:
    """All findings about a run, the comparison with its reference first."""
    findings = [*_changes(run), *_learning(run), *_rise(run)]
    if not any(finding.kind == "bad" for finding in findings):
        findings.append(Finding("good", "Nothing else stands out."))
    return [compare_with_reference(run, references), *findings]


def compare_with_reference(run: Run, references: list[Reference]) -> Finding:
    """Whether the validation loss follows the reference, if the two can be compared at equal tokens."""
    if not run.config:
        return Finding("note", "It has no checkpoint yet, so its settings are unknown: no comparison yet.")
    if run.config.get("init_from"):
        return Finding("note", "It starts from other weights (init_from), to which no reference curve applies.")
    reference = find_reference(run, references)
    if reference is None:
        model = f"{run.config.get('n_layer')} layers of {run.config.get('n_embd')}"
        return Finding("note", f"No reference curve ships for {run.dataset or 'these data'} and this model ({model}).")
    name = f"the reference ({reference.name}, {reference.dataset})"
    if differences := reference.differences(run):
        return Finding("note", f"It cannot be compared with {name} at equal steps: {'; '.join(differences)}.")
    tokens, excess, tolerance = distance(run.series("val_loss"), reference)
    if not len(tokens):
        first_tokens = si(reference.val_loss[1, 0], "B")
        return Finding("note", f"It cannot be compared yet: {name} begins at {first_tokens} tokens.")
    latest = f"{abs(excess[-1]):.2f} nats {'above' if excess[-1] > 0 else 'below'} it at {si(tokens[-1], 'B')} tokens"
    followed = np.flatnonzero(np.abs(excess) <= tolerance)
    if len(excess) - 1 in followed:
        return Finding("good", f"The validation loss follows {name}: {latest}.")
    departed_at = si(tokens[followed[-1] + 1 if len(followed) else 0], "B")
    if excess[-1] > 0:
        causes = "Usual causes: unintended data or tokens, or a change to the model or the optimizer."
    else:
        causes = "Lower is suspicious too: different or easier validation data, or validation text in training."
    text = f"The validation loss has departed from {name} since {departed_at} tokens: {latest}, expected within"
    return Finding("bad", f"{text} {tolerance[-1]:.2f}. {causes}")


def distance(curve: tuple[np.ndarray, np.ndarray], reference: Reference) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, difference of the loss from the reference, tolerance), (n,) each; losses in nats.

    The reference is interpolated in the logarithm of the tokens. The tolerance is its noise plus the effect of a tenth
    more or fewer tokens: where the loss falls steeply, a longer warm-up makes a large but meaningless difference.
    """
    x, y = curve
    points = reference.val_loss[reference.val_loss[:, 0] > 0]
    in_range = (x >= points[0, 0]) & (x <= points[-1, 0] * (1 + REL_TOL))
    x, y = x[in_range], y[in_range]
    expected, at_fewer, at_more = (
        np.interp(np.log(x * k), np.log(points[:, 0]), points[:, 1]) for k in (1, 1 - TOKEN_SHIFT, 1 + TOKEN_SHIFT)
    )
    return x, y - expected, reference.noise + np.maximum(np.abs(at_fewer - expected), np.abs(at_more - expected))


def _changes(run: Run) -> Iterator[Finding]:
    """Settings that a resume has changed: the page lists those of the newest checkpoint."""
    for before, after in pairwise(run.parts):
        old, new = before["config"], after["config"]
        names = [name for name in new if name in old and old[name] != new[name]]
        if changes := ", ".join(f"{name} {old[name]} -> {new[name]}" for name in names):
            yield Finding("note", f"It was resumed from step {after['from_step']:,} with other settings: {changes}.")


def _learning(run: Run) -> Iterator[Finding]:
    """Checks of the first loss, of whether the loss falls, and of skipped steps."""
    vocab_size, last_step = run.config.get("vocab_size") or 50257, run.records[-1]["step"]
    uniform_loss = math.log(vocab_size)
    steps, val = run.series("val_loss", "step")
    is_first = run.config and not run.config.get("init_from") and len(steps) and steps[0] == 0  # of random weights
    margin_below, margin_above = INITIAL_LOSS_MARGINS
    if is_first and not uniform_loss - margin_below <= val[0] <= uniform_loss + margin_above:
        text = f"The loss begins at {val[0]:.2f}; a uniform prediction has ln {vocab_size:,} = {uniform_loss:.2f}. "
        yield Finding("bad", text + "Check the initial weights, and that the targets are shifted by one.")
    steps, loss = run.series("loss", "step")
    if len(steps) and steps[-1] >= LEARNING_STEP and np.median(loss[-5:]) > uniform_loss - LEARNING_DROP:
        text = f"It hardly learns: a training loss of {loss[-1]:.2f} after {steps[-1]:,.0f} steps. "
        yield Finding("bad", text + "Check learning_rate, warmup_steps and the data.")
    skipped = run.last("skipped_steps")
    if skipped > 0:  # fp16's loss scaling skips a few steps at the start and one now and then
        kind = "bad" if skipped > max(MAX_SKIPPED, 0.01 * last_step) else "note"
        text = f"{skipped:,.0f} of {last_step:,} steps were skipped because of a spike or a non-finite gradient. "
        yield Finding(kind, text + "If there are many, lower learning_rate or use a precision other than fp16.")


def _rise(run: Run) -> Iterator[Finding]:
    """Overfitting or divergence: the validation loss has risen above its own minimum, or the training loss has."""
    x, val = run.series("val_loss")
    tokens, loss = run.series("loss")
    for before, after in pairwise(run.parts):
        if any(before["config"].get(name) != after["config"].get(name) for name in ("val_data", "eval_tokens")):
            is_comparable = x > after["from_step"] * run.config["total_batch_tokens"]
            x, val = x[is_comparable], val[is_comparable]
    medians = [np.median(part) for part in np.array_split(loss, 10)] if len(loss) >= MIN_LINES else [0]
    has_risen = medians[-1] > min(medians) + MAX_TRAINING_RISE
    if len(x) < 3 or val[-1] - val.min() <= MAX_RISE:
        if has_risen:
            text = f"The training loss has risen from {min(medians):.2f} to {medians[-1]:.2f}: it diverges. "
            yield Finding("bad", text + "A lower learning_rate or more warm-up would help.")
        return
    low = int(val.argmin())
    at_low, at_end = (loss[np.abs(tokens - x[i]).argsort()[:5]] for i in (low, -1))  # the five lines nearest to each
    text = f"The validation loss is {val[-1]:.2f}, above its minimum of {val[low]:.2f} at {si(x[low], 'B')} tokens, "
    is_random = x[low] == 0 and not run.config.get("init_from")  # such weights are not worse after overfitting
    if len(loss) and np.median(at_end) < np.median(at_low) and not (has_risen or is_random):
        text += "while the training loss falls: overfitting. Fewer steps (max_steps), more data or dropout would help."
    else:
        text += "and the training loss is not lower: it diverges. A lower learning_rate or more warm-up would help."
    yield Finding("bad", text)
