"""Run by a test, as several_runs, with an optimizer of one's own in AdamW's place."""

import runpy

import torch


class RowAdam(torch.optim.Optimizer):
    """Adam with a second moment for each row of a matrix, and the largest for each column and for all of it. ZeRO shows
    it no matrices."""

    def __init__(self, groups, *, lr: float, **_):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state, squares = self.state[p], p.grad.square()
                squares = squares.mean(-1, keepdim=True) if p.ndim == 2 else squares
                if not state:
                    state |= {"step": torch.tensor(0.0), "momentum": torch.zeros_like(p), "rows": squares}
                    if p.ndim == 2:
                        state |= {"largest": torch.tensor(0.0), "columns": squares.new_zeros(p.shape[1])}
                state["step"] += 1
                state["momentum"].lerp_(p.grad, 0.1)
                state["rows"] = state["rows"].lerp(squares, 0.1)
                rate = group["lr"]
                if p.ndim == 2:
                    state["largest"] = torch.maximum(state["largest"], group["lr"] * state["step"])
                    state["columns"] = torch.maximum(state["columns"], p.grad.square().amax(0))
                    rate = state["largest"].item() / 10 / (1 + state["columns"])
                p.sub_(state["momentum"] / (state["rows"].sqrt() + 1e-6) * rate)


if __name__ == "__main__":
    torch.optim.AdamW = RowAdam
    runpy.run_module("tests.engine.several_runs", run_name="__main__")
