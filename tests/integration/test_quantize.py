"""Whole conversions with the installed plugins: dense and GGUF models in, loadable checkpoints out."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from deepinfer_core.checkpoint import LayerFormat, open_checkpoint
from deepinfer_core.errors import CapacityError, CheckpointError, ConfigError, DeepinferError, ModelError
from deepinfer_core.llm import LLM
from deepinfer_core.quantize import QuantizationReport, quantize
from deepinfer_core.registry.catalog import Catalog, make_scheme
from deepinfer_core.registry.discovery import discover

VOCAB = 48
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKENS = [3, 7, 11, 2, 30, 47, 5]

Tensors = dict[str, torch.Tensor]


def llama_tensors(hidden: int = 64, wide: int = 160) -> Tensors:
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.2).half()

    tensors = {EMBEDDING: random(VOCAB, hidden), HEAD: random(VOCAB, hidden), "model.norm.weight": 1 + random(hidden)}
    shapes = {
        "self_attn.q_proj": (64, hidden), "self_attn.k_proj": (32, hidden), "self_attn.v_proj": (32, hidden),
        "self_attn.o_proj": (hidden, 64), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    for i in range(2):
        tensors |= {f"model.layers.{i}.{n}.weight": random(*shape) for n, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = 1 + random(hidden)
    return tensors


def write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.from_discovery(discover())


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Returns save(tensors, name="src", **config changes) -> directory with tokenizer and generation config."""

    def save(tensors: Tensors, name: str = "src", **changes: Any) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
        write_tokenizer(directory)
        save_file(tensors, directory / "model.safetensors")
        return directory

    return save


def dense_twin(path: Path, catalog: Catalog) -> Tensors:
    """Return a checkpoint's values as dense float32 tensors, by the schemes' own dequantize."""
    checkpoint = open_checkpoint(path)
    tensors: Tensors = {}
    for name in checkpoint.names():
        module, _, part = name.rpartition(".")
        form = checkpoint.layer_format(module)
        if part == "packed":
            k = 160 if module.endswith("down_proj") else 64
            scheme = make_scheme(catalog, form.scheme)
            stored = checkpoint.layer_tensors(module)
            tensors[f"{module}.weight"] = scheme.dequantize(stored, k=k, group_size=form.group_size)
        elif part not in ("scales", "zeros"):
            tensors[name] = checkpoint.tensor(name).float()
    return tensors


def logits(path: Path, catalog: Catalog) -> torch.Tensor:
    return LLM(path, catalog=catalog, dtype="float32", device="cpu").logits(TOKENS)


RECIPES = {
    "w4": {"model.layers.*": "w4a16"},
    "w3": {"model.layers.*": "w3a16"},
    "mixed": {"model.layers.*.self_attn.*": "w4a16", "model.layers.*.mlp.*": "w3a16"},
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("zeros", [None, True])
def test_a_converted_model_answers_like_a_dense_model_of_its_values(
    save: Callable[..., Path], tmp_path: Path, catalog: Catalog, recipe: str, zeros: bool | None
) -> None:
    source, result = save(llama_tensors()), tmp_path / "result"
    report = quantize(source, result, recipe, catalog=catalog, group_size=32, zeros=zeros)
    config = json.loads((result / "config.json").read_text())
    layers = config["quantization_config"]["layers"]
    assert {pattern: entry["scheme"] for pattern, entry in layers.items()} == RECIPES[recipe]
    assert all(entry["distribution"] == f"deepinfer-plugin-{entry['scheme']}" for entry in layers.values())
    assert all(entry["zeros"] is bool(zeros) for entry in layers.values())
    assert {key: config[key] for key in CONFIG} == CONFIG
    assert open_checkpoint(result).eos_token_ids() == {1, 2}
    twin = save(dense_twin(result, catalog), "twin")
    assert torch.allclose(logits(result, catalog), logits(twin, catalog), atol=1e-4)
    errors = {layer.module: layer.relative_error for layer in report.layers}
    assert errors.pop("lm_head") == 0
    for module, error in errors.items():
        weight = open_checkpoint(source).tensor(f"{module}.weight").float()
        value = dense_twin(result, catalog)[f"{module}.weight"]
        assert error == pytest.approx(float((value - weight).norm() / weight.norm()), rel=1e-4)
        assert 0.01 < error < (0.15 if "w4" in recipe or ("attn" in module and recipe == "mixed") else 0.3)
    assert json.loads((result / "quantization_report.json").read_text())["recipe"] == recipe
    assert sorted(p.name for p in tmp_path.iterdir()) == ["result", "src", "twin"]


@pytest.mark.parametrize("scheme", ["w4a16", "w3a16"])
@pytest.mark.parametrize(("k", "n", "group"), [(160, 64, 128), (336, 16, 32), (128, 64, -1), (50, 8, -1), (67, 8, 32)])
def test_any_k_and_group_gives_the_right_values_after_reload(
    save: Callable[..., Path], tmp_path: Path, catalog: Catalog, scheme: str, k: int, n: int, group: int
) -> None:
    """QW-04: K that is no multiple of the group, odd K, and the whole row as one group."""
    tensors = llama_tensors(hidden=n, wide=k)
    source = save(tensors, hidden_size=n, intermediate_size=k, head_dim=16)
    rule = f'[[rules]]\npattern = "model.layers.*.mlp.down_proj"\nscheme = "{scheme}"\ngroup_size = {group}\n'
    (tmp_path / "recipe.toml").write_text(rule)
    quantize(source, tmp_path / "result", str(tmp_path / "recipe.toml"), catalog=catalog)
    module = "model.layers.1.mlp.down_proj"
    checkpoint = open_checkpoint(tmp_path / "result")
    assert checkpoint.layer_format(module) == LayerFormat(scheme, group, False, f"deepinfer-plugin-{scheme}")
    stored = checkpoint.layer_tensors(module)
    width = k if group == -1 else group
    assert stored["scales"].shape == (n, -(-k // width))
    values = make_scheme(catalog, scheme).dequantize(stored, k=k, group_size=group)
    weight = tensors[f"{module}.weight"].float()
    assert values.abs().max() > 0
    # no group's error is worse than that of plain rounding: half a scale that spans the group's largest value
    steps = 7 if scheme == "w4a16" else 3
    for begin in range(0, k, width):
        part = slice(begin, min(begin + width, k))
        largest = weight[:, part].abs().amax(1)
        error = (values[:, part] - weight[:, part]).square().mean(1).sqrt()
        assert (error <= largest / steps / 2 * 1.01).all()
    assert torch.isfinite(LLM(tmp_path / "result", catalog=catalog, dtype="float32", device="cpu").logits(TOKENS)).all()


@pytest.mark.parametrize("scheme", ["w4a16", "w3a16"])
@pytest.mark.parametrize("zeros", ["true", "false"])
def test_all_zero_rows_stay_zero_and_logits_finite(
    save: Callable[..., Path], tmp_path: Path, catalog: Catalog, scheme: str, zeros: str
) -> None:
    """QW-05: unused vocabulary rows, one of them of negative zeros."""
    tensors = llama_tensors()
    tensors[HEAD][10:20] = 0
    tensors[HEAD][20] = -0.0
    (tmp_path / "recipe.toml").write_text(f'[[rules]]\npattern = "*"\nscheme = "{scheme}"\nzeros = {zeros}\n')
    quantize(save(tensors), tmp_path / "result", str(tmp_path / "recipe.toml"), catalog=catalog)
    checkpoint = open_checkpoint(tmp_path / "result")
    stored = checkpoint.layer_tensors("lm_head")
    form = checkpoint.layer_format("lm_head")
    values = make_scheme(catalog, scheme).dequantize(stored, k=64, group_size=form.group_size)
    assert (values[10:21] == 0).all()
    assert torch.isfinite(stored["scales"].float()).all()
    others = torch.cat([tensors[HEAD][:10], tensors[HEAD][21:]])
    alone = make_scheme(catalog, scheme).quantize(others.float(), group_size=form.group_size, zeros=zeros == "true")
    for part, tensor in alone.items():
        assert torch.equal(torch.cat([stored[part][:10], stored[part][21:]]), tensor)
    out = logits(tmp_path / "result", catalog)
    assert torch.isfinite(out).all()
    assert (out[:, 10:21] == 0).all()


def test_a_head_is_the_same_however_the_tied_pair_is_stored(
    save: Callable[..., Path], tmp_path: Path, catalog: Catalog
) -> None:
    """QW-07: tied with the embedding alone, with both, with the head alone; dense and after conversion."""
    tensors = llama_tensors()
    del tensors[HEAD]
    embedding = tensors.pop(EMBEDDING)
    ways = {"embedding": (EMBEDDING,), "both": (EMBEDDING, HEAD), "head": (HEAD,)}
    dense, converted = [], []
    for way, names in ways.items():
        source = save(tensors | {name: embedding.clone() for name in names}, way, tie_word_embeddings=True)
        dense.append(logits(source, catalog))
        quantize(source, tmp_path / f"{way}-w4", "w4", catalog=catalog)
        assert open_checkpoint(tmp_path / f"{way}-w4").names() >= {EMBEDDING}
        assert HEAD not in open_checkpoint(tmp_path / f"{way}-w4").stored_names()
        converted.append(logits(tmp_path / f"{way}-w4", catalog))
    for group in (dense, converted):
        assert group[0].abs().max() > 0.1
        assert torch.equal(group[0], group[1])
        assert torch.equal(group[0], group[2])


def test_an_untied_head_stays_dense_beside_quantized_layers(
    save: Callable[..., Path], tmp_path: Path, catalog: Catalog
) -> None:
    """QW-07, fourth way."""
    tensors = llama_tensors()
    quantize(save(tensors), tmp_path / "result", "w4", catalog=catalog)
    checkpoint = open_checkpoint(tmp_path / "result")
    assert checkpoint.layer_format("lm_head").dense
    assert torch.equal(checkpoint.layer_tensors("lm_head")["weight"], tensors[HEAD])


def test_a_missing_untied_head_is_a_named_error(save: Callable[..., Path], tmp_path: Path, catalog: Catalog) -> None:
    tensors = llama_tensors()
    del tensors[HEAD]
    source = save(tensors)
    for attempt in (
        lambda: quantize(source, tmp_path / "result", "w4", catalog=catalog),
        lambda: LLM(source, catalog=catalog, device="cpu"),
    ):
        with pytest.raises(CheckpointError, match=r"missing tensors \(1\): lm_head.weight"):
            attempt()


def test_a_tied_head_that_is_quantized_gets_tensors_of_its_own(
    save: Callable[..., Path], tmp_path: Path, catalog: Catalog
) -> None:
    tensors = llama_tensors()
    del tensors[HEAD]
    (tmp_path / "recipe.toml").write_text('[[rules]]\npattern = "lm_head"\nscheme = "w4a16"\n')
    source = save(tensors, tie_word_embeddings=True)
    quantize(source, tmp_path / "result", str(tmp_path / "recipe.toml"), catalog=catalog)
    checkpoint = open_checkpoint(tmp_path / "result")
    assert checkpoint.hf_config["tie_word_embeddings"] is False
    assert torch.equal(checkpoint.tensor(EMBEDDING), tensors[EMBEDDING])
    assert checkpoint.layer_format("lm_head").scheme == "w4a16"
    twin = dense_twin(tmp_path / "result", catalog)
    assert not torch.equal(twin[HEAD], twin[EMBEDDING])
    assert torch.allclose(logits(tmp_path / "result", catalog), logits(save(twin, "twin"), catalog), atol=1e-4)


def gguf_model(path: Path) -> Path:
    rng = np.random.default_rng(3)
    kind = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "qwen2")
    for key, value in {
        "block_count": 1, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2,
    }.items():  # fmt: skip
        writer.add_uint32(f"qwen2.{key}", value)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
    shapes = {
        "token_embd.weight": (VOCAB, 64, kind.Q8_0), "output_norm.weight": (64, kind.F32),
        "blk.0.attn_norm.weight": (64, kind.F32), "blk.0.ffn_norm.weight": (64, kind.F32),
        "blk.0.attn_q.weight": (64, 64, kind.Q4_1), "blk.0.attn_k.weight": (32, 64, kind.Q4_0),
        "blk.0.attn_v.weight": (32, 64, kind.Q8_0), "blk.0.attn_output.weight": (64, 64, kind.Q4_1),
        "blk.0.attn_q.bias": (64, kind.F32), "blk.0.attn_k.bias": (32, kind.F32), "blk.0.attn_v.bias": (32, kind.F32),
        "blk.0.ffn_gate.weight": (96, 64, kind.Q4_1), "blk.0.ffn_up.weight": (96, 64, kind.Q5_1),
        "blk.0.ffn_down.weight": (64, 96, kind.Q4_1),
    }  # fmt: skip
    for name, (*shape, quant) in shapes.items():
        values = (rng.standard_normal(shape) * 0.2).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_four_bit_gguf_layers_are_carried_over_and_the_others_keep_their_groups(
    tmp_path: Path, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    path = gguf_model(tmp_path / "model.gguf")
    with caplog.at_level(logging.WARNING, "deepinfer"):
        report = quantize(path, tmp_path / "result", "w4", catalog=catalog)
    assert "has no tokenizer" in caplog.text
    source, result = open_checkpoint(path), open_checkpoint(tmp_path / "result")
    reports = {layer.module.rpartition(".")[2]: layer for layer in report.layers}
    carried = {name for name, layer in reports.items() if layer.carried}
    assert carried == {"q_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "lm_head"}
    for layer in report.layers:
        if layer.carried and layer.module != "lm_head":
            theirs, ours = source.layer_tensors(layer.module), result.layer_tensors(layer.module)
            assert theirs.keys() == ours.keys()
            assert all(torch.equal(theirs[part], ours[part]) for part in theirs)
    assert [(reports[m].group_size, reports[m].zeros) for m in ("v_proj", "up_proj")] == [(32, False), (32, True)]
    assert all(0 < reports[m].relative_error < 0.12 for m in ("v_proj", "up_proj"))
    assert result.tensor(EMBEDDING).dtype == torch.float16
    assert result.dtype("model.norm.weight") == "float32"
    assert torch.equal(result.tensor("model.layers.0.self_attn.q_proj.bias"),
                       source.tensor("model.layers.0.self_attn.q_proj.bias"))  # fmt: skip


@pytest.fixture
def converted(save: Callable[..., Path], tmp_path: Path, catalog: Catalog) -> tuple[Path, Path]:
    source = save(llama_tensors())
    quantize(source, tmp_path / "result", "w4", catalog=catalog)
    return source, tmp_path / "result"


def listing(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_a_destination_with_content_is_refused_or_replaced_when_asked(
    converted: tuple[Path, Path], catalog: Catalog
) -> None:
    source, result = converted
    before = listing(result)
    with pytest.raises(CheckpointError, match=r"is not empty"):
        quantize(source, result, "w3", catalog=catalog)
    assert listing(result) == before
    quantize(source, result, "w3", catalog=catalog, overwrite=True)
    assert open_checkpoint(result).layer_format("model.layers.0.mlp.up_proj").scheme == "w3a16"
    with pytest.raises(CheckpointError, match=r"the source .* is there"):
        quantize(source, source, "w4", catalog=catalog, overwrite=True)


@pytest.mark.parametrize("stop", [0, 5, 20])
def test_ctrl_c_leaves_nothing_new_and_nothing_broken(
    converted: tuple[Path, Path], tmp_path: Path, catalog: Catalog, stop: int
) -> None:
    source, result = converted
    before = listing(tmp_path)
    calls = 0

    def interrupt(done: int, total: int, what: str) -> None:
        nonlocal calls
        if calls == stop:
            raise KeyboardInterrupt
        calls += 1

    for target in (result, tmp_path / "fresh"):
        calls = 0
        with pytest.raises(KeyboardInterrupt):
            quantize(source, target, "w3", catalog=catalog, overwrite=True, progress=interrupt)
    assert listing(tmp_path) == before


def test_progress_goes_from_nothing_to_all_bytes(save: Callable[..., Path], tmp_path: Path, catalog: Catalog) -> None:
    seen: list[tuple[int, int, str]] = []
    report: QuantizationReport = quantize(
        save(llama_tensors()), tmp_path / "result", "w4", catalog=catalog, progress=lambda *now: seen.append(now)
    )
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[0][0] == 0
    assert seen[-1] == (report.total_bytes, report.total_bytes, "done")


def test_one_tensor_is_in_memory_at_a_time(
    save: Callable[..., Path], tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer_core.checkpoint.safetensors_file import SafetensorsFile

    read, alive = SafetensorsFile.read, []

    def counting(self: SafetensorsFile, name: str) -> torch.Tensor:
        import weakref

        alive[:] = [reference for reference in alive if reference() is not None]
        assert len(alive) <= 1, "a tensor read before the last one is still held"
        tensor = read(self, name).clone()
        alive.append(weakref.ref(tensor))
        return tensor

    source = save(llama_tensors())
    monkeypatch.setattr(SafetensorsFile, "read", counting)
    quantize(source, tmp_path / "result", "w4", catalog=catalog)
    assert len(alive) >= 1


def test_large_layers_are_quantized_some_rows_at_a_time_with_the_same_result(
    save: Callable[..., Path], tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(llama_tensors())
    quantize(source, tmp_path / "whole", "mixed", catalog=catalog)
    monkeypatch.setattr("deepinfer_core.quantize.convert.CHUNK_ELEMENTS", 1000)
    quantize(source, tmp_path / "rows", "mixed", catalog=catalog)
    whole, rows = (listing(tmp_path / name)["model.safetensors"] for name in ("whole", "rows"))
    assert whole == rows


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ModelError, "GPT2LMHeadModel"),
        ({"num_hidden_layers": 3}, CheckpointError, r"missing tensors \(9\): model.layers.2"),
        ({"intermediate_size": 128}, CheckpointError, r"has shape \[160, 64\], the config asks for \[128, 64\]"),
    ],
)
def test_a_source_that_cannot_be_converted_is_refused_before_any_work(
    save: Callable[..., Path],
    tmp_path: Path,
    catalog: Catalog,
    change: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    source = save(llama_tensors(), **change)
    with pytest.raises(error, match=message):
        quantize(source, tmp_path / "result", "w4", catalog=catalog)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_weights_that_are_not_finite_are_named(save: Callable[..., Path], tmp_path: Path, catalog: Catalog) -> None:
    tensors = llama_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight holds NaN or infinity"):
        quantize(save(tensors), tmp_path / "result", "w4", catalog=catalog)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


@pytest.mark.parametrize("name", [EMBEDDING, HEAD, "model.norm.weight"])
def test_tensors_that_stay_dense_are_checked_too(
    save: Callable[..., Path], tmp_path: Path, catalog: Catalog, name: str
) -> None:
    tensors = llama_tensors()
    tensors[name].view(-1)[5] = float("inf")
    with pytest.raises(CheckpointError, match=rf"{name} holds NaN or infinity"):
        quantize(save(tensors), tmp_path / "result", "w4", catalog=catalog)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_a_layer_that_its_scheme_refuses_is_named(save: Callable[..., Path], tmp_path: Path, catalog: Catalog) -> None:
    tensors = {name: tensor.float() for name, tensor in llama_tensors().items()}
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1e30
    with pytest.raises(DeepinferError, match=r"src: model.layers.1.mlp.up_proj.weight as w4a16 .*65504"):
        quantize(save(tensors), tmp_path / "result", "w4", catalog=catalog)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_a_loop_of_links_as_destination_is_named(save: Callable[..., Path], tmp_path: Path, catalog: Catalog) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match=r"loop cannot be written to: "):
        quantize(save(llama_tensors()), tmp_path / "loop", "w4", catalog=catalog)


def test_an_unknown_method_is_named(save: Callable[..., Path], tmp_path: Path, catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match=r"unknown method 'serch'; did you mean 'search'"):
        quantize(save(llama_tensors()), tmp_path / "result", "w4", catalog=catalog, method="serch")  # type: ignore[arg-type]


def test_a_full_disk_is_found_out_before_any_work(
    save: Callable[..., Path], tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(CapacityError, match=r"the result takes .* the disk has 0 MiB free"):
        quantize(save(llama_tensors()), tmp_path / "result", "w4", catalog=catalog)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_a_converted_model_can_be_converted_further(
    converted: tuple[Path, Path], tmp_path: Path, catalog: Catalog
) -> None:
    _, w4 = converted
    report = quantize(w4, tmp_path / "mixed", "mixed", catalog=catalog)
    carried = {layer.module for layer in report.layers if layer.carried}
    assert all(("self_attn" in m or m == "lm_head") for m in carried)
    assert len(carried) == 9
    assert open_checkpoint(tmp_path / "mixed").layer_format("model.layers.0.mlp.up_proj").scheme == "w3a16"
