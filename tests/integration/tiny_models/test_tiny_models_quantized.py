"""Quantized tiny models equal a dense run over their dequantized weights, however the forms are mixed."""

import pytest
import torch

from deepinfer_core.errors import CheckpointError
from deepinfer_core.model.hf_config import model_spec_from_hf
from deepinfer_core.model.shapes import linear_modules
from deepinfer_core.registry.catalog import make_scheme

CLOSE = {"rtol": 0, "atol": 1e-4}

W4 = ("w4a16", 32, False)
W4_ZEROS = ("w4a16", 32, True)
W4_ROW = ("w4a16", -1, False)
W3 = ("w3a16", 32, False)
W3_ZEROS = ("w3a16", 64, True)

RECIPES = {
    "w4": {"": W4},
    "w4-zeros": {"": W4_ZEROS},
    "w4-whole-row": {"": W4_ROW},
    "w3": {"": W3},
    "w3-zeros": {"": W3_ZEROS},
    "mixed": {"self_attn": W4, "mlp": W3},
    "unmerged": {"q_proj": W4, "k_proj": W4_ZEROS, "gate_proj": W3, "up_proj": W4, "o_proj": W3},
    "head": {"lm_head": W4, "mlp": W4},
}


def quantize(model, recipe, catalog, tools):
    """Return (config, source with quantized modules); the model itself gets the dequantized weights."""
    config = model.config.to_dict()
    tensors, quantized = model.state_dict(), {}
    for module in linear_modules(model_spec_from_hf(config)):
        form = next((form for part, form in recipe.items() if part in module.name), None)
        if form is None or (module.name == "lm_head" and "lm_head" not in recipe):
            continue
        scheme, group_size, zeros = form
        maker = make_scheme(catalog, scheme)
        packed = maker.quantize(tensors[f"{module.name}.weight"], group_size=group_size, zeros=zeros, method="rtn")
        quantized[module.name] = tools.format(*form), packed
        dense = maker.dequantize(packed, k=module.k, group_size=group_size)
        model.get_submodule(module.name).weight.data = dense
    return config, tools.source({k: v.clone() for k, v in model.state_dict().items()}, quantized)


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("family", ["llama-biases-linear", "qwen2-yarn", "qwen3", "mistral"])
def test_logits_equal_a_dense_run_over_the_dequantized_weights(family, recipe, make_model, load, catalog, tools):
    model = make_model(family)
    before = tools.logits(model, tools.tokens(20))
    config, source = quantize(model, RECIPES[recipe], catalog, tools)
    right = tools.logits(model, tools.tokens(20))
    assert (right - before).abs().max() > 0.01, "quantizing changed nothing"
    runner = load((config, source))
    found = [runner.step(("a", tools.tokens(20)[:14]))["a"]]
    found += [runner.step(("a", [token]))["a"] for token in tools.tokens(20)[14:]]
    torch.testing.assert_close(torch.cat(found), right, **CLOSE)


def test_slots_follow_the_formats(make_model, load, catalog, tools):
    runner = load(quantize(make_model("qwen3"), RECIPES["unmerged"], catalog, tools))
    slots = {name: slot.format.scheme for name, (slot, _) in runner.decoder.linears.items()}
    assert {k: v for k, v in slots.items() if k.startswith("layers.0.")} == {
        "layers.0.q": "w4a16",
        "layers.0.k": "w4a16",
        "layers.0.v": "fp16",
        "layers.0.o": "w3a16",
        "layers.0.gate": "w3a16",
        "layers.0.up": "w4a16",
        "layers.0.down": "fp16",
    }


def test_a_quantized_head_of_a_tied_model_is_its_own(make_model, load, catalog, tools):
    model = make_model("llama-tied-llama3")
    config, source = quantize(model, {"mlp": W4}, catalog, tools)
    table = source.tensors["model.embed_tokens.weight"]
    maker = make_scheme(catalog, "w4a16")
    packed = maker.quantize(table, group_size=32, zeros=False, method="rtn")
    source.quantized["lm_head"] = tools.format(*W4), packed
    source.tensors.pop("lm_head.weight", None)
    model.lm_head.weight = torch.nn.Parameter(maker.dequantize(packed, k=72, group_size=32))
    right = tools.logits(model, tools.tokens(12))
    torch.testing.assert_close(load((config, source)).step(("a", tools.tokens(12)))["a"], right, **CLOSE)


def test_an_untied_dense_head_inside_a_w4_checkpoint_stays_dense(make_model, load, catalog, tools):
    model = make_model("llama")
    config, source = quantize(model, {"self_attn": W4, "mlp": W4}, catalog, tools)
    runner = load((config, source))
    assert runner.decoder.linears["lm_head"][0].format.scheme == "fp16"
    right = tools.logits(model, tools.tokens(12))
    torch.testing.assert_close(runner.step(("a", tools.tokens(12)))["a"], right, **CLOSE)


def test_rows_that_do_not_fit_the_layer_are_named(make_model, load, catalog, tools):
    config, source = quantize(make_model("llama"), {"down_proj": W4}, catalog, tools)
    form, packed = source.quantized["model.layers.1.mlp.down_proj"]
    source.quantized["model.layers.1.mlp.down_proj"] = form, packed | {"scales": packed["scales"][:-1]}
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.scales has shape \(71, 4\)"):
        load((config, source))
