"""Time and price of a run, beside published ones."""

from recipe.estimate import cost


def test_the_table_prices_published_runs(capsys, tmp_path, monkeypatch):
    """karpathy/llm.c: 1558M on 8 H100 in 24 h for $672, $28 an hour of the node (discussion 677); 355M on 8 A100 in
    13.7 h."""
    monkeypatch.chdir(tmp_path)
    assert cost.main(["--price_per_hour=3.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    medium, xl = (next(i for i, line in enumerate(lines) if line.startswith(f"gpt2-{size}")) for size in ("med", "xl"))
    assert lines[medium + 1].split()[3:5] == ["13.7", "h"]
    assert "8 x H100       24.9 h     199 device-hours  $696  at 48.7 % MFU, published by llm.c" in lines[xl + 2]
    assert lines[xl + 4].endswith("at an assumed 40 % MFU")  # of an RTX 4090
    # 10 B tokens of 124M on 8 A100: 18,865 steps of 300 ms are 94 minutes (discussion 481).
    assert lines[next(i for i, line in enumerate(lines) if line.startswith("gpt2,")) + 1].split()[3:5] == ["1.6", "h"]
    assert not any(tmp_path.iterdir())  # it writes nothing


def test_a_cpus_speed_is_measured_and_positive():
    assert 1e7 < cost.cpu_flops("fp32") < 1e15
