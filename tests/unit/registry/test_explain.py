"""Explanations: every distinct shape once, every candidate accounted for, failures told and not raised."""

from __future__ import annotations

import json
from typing import Any

from deepinfer_core.plugin_api import MRange
from deepinfer_core.registry.choice import LinearChoice
from deepinfer_core.registry.explain import auto_dtype, explain_linear


def automatic(scheme: str) -> LinearChoice:
    return LinearChoice()


def test_layers_of_one_shape_are_explained_once(build: Any) -> None:
    found = build.of_kernels(build.kernel())
    layers = [
        ("layers.0.q", build.problem()),
        ("layers.1.q", build.problem(bias=True)),
        ("layers.0.qkv", build.problem(n=192, parts=(64, 64, 64))),
        ("layers.0.wide", build.problem(n=192)),
    ]
    explained = explain_linear(found, layers, automatic)
    assert [(e.problem.n, e.layers) for e in explained] == [
        (64, ("layers.0.q", "layers.1.q")),
        (192, ("layers.0.qkv", "layers.0.wide")),
    ]


def test_json_holds_rows_and_rejections(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.a", MRange(1, 4)), build.kernel("w.b", device="cpu"))
    (item,) = explain_linear(found, [("q", build.problem())], automatic)
    data = json.loads(json.dumps(item.to_json()))
    first = data["rows"][0]
    keys = ("m_from", "m_to", "kernel", "distribution", "version")
    assert [first[key] for key in keys] == [1, 4, "w.a", "dist-w", "1.0"]
    assert data["capability"] == "8.6"
    assert data["rejected"][0]["reason"] == "runs on cpu, asked for cuda"
    assert data["error"] is None


def test_a_shape_that_nothing_serves_is_explained_beside_the_others(build: Any) -> None:
    found = build.of_kernels(build.kernel())
    good, bad = explain_linear(found, [("q", build.problem()), ("x", build.problem(scheme="v"))], automatic)
    assert good.error is None
    assert bad.selection is None
    assert "scheme 'v'" in bad.to_json()["error"]


def test_auto_dtype_on_a_card_is_the_models_own_16_bits(build: Any) -> None:
    def dtype(capability: tuple[int, int], model: str | None) -> str:
        return auto_dtype(build.catalog(), lambda name: (), automatic, capability=capability, model_dtype=model)

    assert dtype((8, 6), "bfloat16") == "bfloat16"
    assert dtype((7, 5), "bfloat16") == "float16"
    assert dtype((8, 6), "float32") == dtype((8, 6), None) == "float16"


def test_auto_dtype_on_a_cpu_is_bf16_only_where_every_quantized_layer_has_a_kernel_for_it(build: Any) -> None:
    found = build.of_kernels(build.kernel(device="cpu", act_dtypes=("bfloat16",), k_multiple_of=32))

    def dtype(*ks: int) -> str:
        def problems(name: str) -> list[Any]:
            return [build.problem(k=k, device="cpu", capability=None, act_dtype=name) for k in ks]

        return auto_dtype(found, problems, automatic, capability=None, model_dtype=None)

    assert dtype(128, 64) == "bfloat16"
    assert dtype(128, 100) == "float32"
    assert dtype() == "float32"
