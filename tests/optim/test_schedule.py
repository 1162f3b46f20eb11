"""Learning rates and momentum against values computed by hand."""

import math
from dataclasses import replace

import pytest

from recipe.config import OptimizerConfig
from recipe.optim.schedule import lr_at, muon_lr_at, muon_momentum_at

COSINE = OptimizerConfig(learning_rate=1.0, min_lr_fraction=0.1, warmup_steps=4, max_steps=12)


def test_cosine():
    assert [lr_at(s, COSINE) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert lr_at(8, COSINE) == pytest.approx(0.1 + 0.9 * 0.5)  # half-way down the cosine
    assert lr_at(12, COSINE) == pytest.approx(0.1)
    assert lr_at(11, COSINE) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 7 / 8)))
    assert 0 < lr_at(11, replace(COSINE, min_lr_fraction=0.0)) < 0.05  # the last step still changes the weights


def test_linear():
    linear = replace(COSINE, lr_scheduler_type="linear")
    assert [lr_at(s, linear) for s in (3, 4, 8, 12)] == pytest.approx([1.0, 1.0, 0.55, 0.1])


def test_wsd_is_constant_and_then_linear():
    wsd = replace(COSINE, lr_scheduler_type="wsd", decay_fraction=0.5, min_lr_fraction=0.0)
    assert [lr_at(s, wsd) for s in (0, 3, 4, 6, 9, 12)] == pytest.approx([0.25, 1.0, 1.0, 1.0, 0.5, 0.0])
    longer = replace(wsd, max_steps=1000)
    assert all(lr_at(s, wsd) == lr_at(s, longer) for s in range(wsd.decay_start + 1))
    without_constant_phase = replace(wsd, decay_fraction=1.0)
    assert [lr_at(s, without_constant_phase) for s in (3, 4, 8, 12)] == pytest.approx([1.0, 1.0, 0.5, 0.0])


def test_muon_has_the_same_shape_without_warmup():
    wsd = replace(COSINE, lr_scheduler_type="wsd", decay_fraction=0.5, min_lr_fraction=0.0, muon_learning_rate=0.02)
    assert [muon_lr_at(s, wsd) for s in (0, 6, 9)] == pytest.approx([0.02, 0.02, 0.01])
    assert muon_lr_at(6, replace(COSINE, muon_learning_rate=1.0)) == pytest.approx(0.1 + 0.9 * 0.5)
    assert [muon_momentum_at(s) for s in (0, 150, 300, 9000)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
