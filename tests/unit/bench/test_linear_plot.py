"""The picture of a linear bench is drawn for any set of rows."""

import pytest

from deepinfer_core.bench.linear_plot import draw

pytest.importorskip("matplotlib")


def test_a_picture_with_missing_peers_and_shapes_is_written(tmp_path):
    cell = {"group_size": 128, "zeros": False, "act_dtype": "float16", "layout": "w4a16.mma16.v1"}
    times = {"us": 3.0, "us_fp16": 6.0, "us_humming": None, "us_tinygemm": None, "us_fallback": 90.0}
    rows = [{**cell, **times, "scheme": s, "m": m, "n": 64, "k": 128} for s in ("w4a16", "w3a16") for m in (1, 8)]
    rows.append({**rows[0], "n": 32})
    path = tmp_path / "new" / "r.png"
    draw(path, {"meta": {"device": "card", "torch": "2", "date": "today"}, "rows": rows})
    assert path.read_bytes().startswith(b"\x89PNG")
