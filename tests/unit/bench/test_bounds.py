"""The judge of a result file: each bound at its edge, references left alone, and the command's status."""

import json

import pytest

from deepinfer_core.bench.bounds import judge, main, references, report


def row(**given):
    plain = {"scheme": "w4a16", "m": 1, "n": 64, "k": 128, "group_size": 128, "zeros": False, "act_dtype": "float16"}
    plain |= {"layout": "w4a16.mma16.v1", "kernel": "w4a16.mma", "us": 10.0, "us_floor": 1.0, "rel_err": 1e-4}
    plain |= {"us_fp16": 20.0, "us_fallback": 400.0, "us_tinygemm": None, "us_humming": None, "spread": 0.0}
    return {**plain, **given}


def missed(*rows):
    return [verdict.bound for verdict in judge(rows) if not verdict.held]


@pytest.mark.parametrize(
    ("m", "limit", "begins"),
    [
        (1, 21.0, "M <= 48"),
        (48, 21.0, "M <= 48"),
        (64, 27.0, "M 64-96"),
        (96, 27.0, "M 64-96"),
        (128, 33.4, "M 128-256"),
        (256, 33.4, "M 128-256"),
        (512, 31.0, "M 512"),
        (1024, 27.0, "M >= 1024"),
        (4096, 27.0, "M >= 1024"),
    ],
)
def test_each_range_of_rows_has_its_ratio_to_cublas(m, limit, begins):
    assert not missed(row(m=m, us=limit - 0.01))
    (bound,) = missed(row(m=m, us=limit + 0.01))
    assert bound.startswith(begins)


def test_peers_count_where_they_should():
    assert missed(row(us=11.0, us_tinygemm=10.0))
    assert missed(row(us=11.0, us_humming=10.0))
    assert not missed(row(m=64, us=13.6, us_tinygemm=1.0, us_humming=None))
    assert missed(row(m=64, us=13.6, us_humming=10.0))
    assert not missed(row(m=128, us=30.0, us_humming=1.0))


def test_goals_are_absolute_and_for_the_plain_case_alone():
    goal = {"n": 2560, "k": 2048}
    assert not missed(row(us=3.2, **goal))
    assert missed(row(us=3.3, **goal)) == ["goal in us (one H200)"]
    assert not missed(row(us=3.3, group_size=64, **goal))
    assert not missed(row(us=3.3, zeros=True, **goal))


def test_the_fallback_is_beaten_fifteen_and_fifty_times_at_thirty_rows():
    assert not missed(row(m=30, us=10.0, us_fallback=150.0))
    assert missed(row(m=30, us=10.0, us_fallback=149.0))
    assert missed(row(m=30, us=10.0, us_fallback=499.0, scheme="w3a16"))


def test_a_wrong_result_is_missed_whatever_it_is_a_row_of_and_references_are_not_raced():
    assert missed(row(rel_err=3e-3)) == ["relative error below 0.002"]
    reference = row(layout="w4a16.rows.v1", kernel="w4a16.tiled_gemm", us=999.0)
    assert not missed(reference)
    assert missed({**reference, "rel_err": 1.0})
    assert not missed(row(rel_err=3e-3, act_dtype="bfloat16"))


def test_the_command_lists_what_is_missed_and_says_so_by_its_status(tmp_path, capsys):
    file = tmp_path / "r.json"
    meta = {"device": "card", "torch": "2", "date": "today"}
    file.write_text(json.dumps({"meta": meta, "rows": [row(), row(m=2, us=50.0)]}))
    assert main([str(file)]) == 1
    out = capsys.readouterr().out
    assert "MISSED 1/2  M <= 48" in out
    assert "missed w4a16 2 x 64 x 128 w4a16.mma: 50, limit 21" in out
    assert " held w4a16" not in out
    file.write_text(json.dumps({"meta": meta, "rows": [row()]}))
    assert main([str(file), "--all"]) == 0
    assert "held w4a16 1 x 64 x 128" in capsys.readouterr().out


def test_no_rows_are_no_report():
    assert report(judge([])) == ""


def test_the_first_system_s_kernels_are_compared_with_the_fallback_ours_and_each_other():
    old = {"layout": "w3a16.rows.v1", "scheme": "w3a16", "m": 4, "us_fallback": None}
    rows = [row(scheme="w3a16", m=4, us=10.0, us_fallback=400.0), row(m=5)]
    rows += [row(**old, kernel="w3a16.gemv", us=50.0), row(**old, kernel="w3a16.batch_tile_gemv", us=100.0)]
    assert references(rows).splitlines() == [
        "w3a16 4 x 64 x 128 w3a16.gemv: 50.0 us, 8.00 x as fast as the fallback, 5.0 x the time of ours, "
        "2.00 x as fast as w3a16.batch_tile_gemv",
        "w3a16 4 x 64 x 128 w3a16.batch_tile_gemv: 100.0 us, 4.00 x as fast as the fallback, 10.0 x the time of ours, "
        "0.50 x as fast as w3a16.gemv",
    ]
    assert references([row()]) == ""
