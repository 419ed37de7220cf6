"""Logits of tiny random models against transformers in float32, whatever way the tokens come."""

import pytest
import torch

from deepinfer_core.errors import CapacityError, CheckpointError, ModelError

CLOSE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture
def pair(name, reference, load):
    model, path = reference(name)
    return model, load(path)


def test_the_reference_is_worth_comparing_with(name, reference, tools):
    logits = tools.logits(reference(name)[0], tools.tokens(40))
    assert logits.std() > 0.5
    assert logits.std(dim=0).min() > 0.05


def test_prefill(pair, tools):
    model, runner = pair
    tokens = tools.tokens(40)
    torch.testing.assert_close(runner.step(("a", tokens))["a"], tools.logits(model, tokens), **CLOSE)


def test_chunked_prefill_over_scattered_pages(pair, tools):
    model, runner = pair
    runner.fragment(40)
    tokens = tools.tokens(40)
    found, start = [], 0
    for chunk in (1, 6, 2, 13, 4, 14):
        found.append(runner.step(("a", tokens[start : start + chunk]))["a"])
        start += chunk
    torch.testing.assert_close(torch.cat(found), tools.logits(model, tokens), **CLOSE)


def test_decode_beyond_any_window(pair, tools):
    model, runner = pair
    tokens = tools.tokens(30)
    found = [runner.step(("a", tokens[:3]))["a"]]
    found += [runner.step(("a", [token]))["a"] for token in tokens[3:]]
    torch.testing.assert_close(torch.cat(found), tools.logits(model, tokens), **CLOSE)


def test_mixed_batches(pair, tools):
    model, runner = pair
    a, b, c = (tools.tokens(n, seed=n) for n in (20, 17, 24))
    found = {"a": [], "b": [], "c": []}
    plan = [
        {"a": a[:9]},
        {"a": a[9:10], "b": b[:5]},
        {"c": c[:11], "a": a[10:11], "b": b[5:12]},
        {"b": b[12:13], "a": a[11:12], "c": c[11:12]},
        {"a": a[12:20], "b": b[13:17], "c": c[12:24]},
    ]
    for step in plan:
        for which, logits in runner.step(*step.items()).items():
            found[which].append(logits)
    for which, tokens in (("a", a), ("b", b), ("c", c)):
        torch.testing.assert_close(torch.cat(found[which]), tools.logits(model, tokens), **CLOSE)


def test_greedy_tokens_equal_those_of_transformers(pair, tools):
    model, runner = pair
    prompt = tools.tokens(7, seed=3)
    right = model.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 7:].tolist()
    logits, ours = runner.step(("a", prompt))["a"], []
    while len(ours) < 20:
        ours.append(int(logits[-1].argmax()))
        logits = runner.step(("a", ours[-1:]))["a"]
    assert ours == right


def test_only_wanted_rows_have_logits(reference, load, tools):
    model, path = reference("llama")
    runner = load(path)
    tokens = tools.tokens(9)
    seq = runner.cache.open(reuse=False)
    runner.cache.extend(seq, 9)
    batch = runner.cache.batch([(seq, 9)])
    for rows in ([8], [7, 2], []):
        found = runner.decoder.forward(torch.tensor(tokens), batch, runner.cache.tensors, torch.tensor(rows).long())
        assert found.shape == (len(rows), 97)
        torch.testing.assert_close(found, tools.logits(model, tokens)[rows], **CLOSE)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.015)])
def test_half_precision_stays_near_float32(name, dtype, tolerance, reference, load, tools):
    model, path = reference(name)
    runner, tokens = load(path, dtype=dtype), tools.tokens(24)
    prefill = runner.step(("a", tokens[:20]))["a"]
    decode = torch.cat([runner.step(("a", [token]))["a"] for token in tokens[20:]])
    right = tools.logits(model, tokens)
    difference = (torch.cat((prefill, decode)) - right).abs()
    assert difference.mean() < tolerance * right.std()


def test_int8_cache_stays_near_float32(name, reference, load, tools):
    model, path = reference(name)
    runner, tokens = load(path, kv_dtype="int8"), tools.tokens(24)
    prefill = runner.step(("a", tokens[:20]))["a"]
    decode = torch.cat([runner.step(("a", [token]))["a"] for token in tokens[20:]])
    right = tools.logits(model, tokens)
    assert (torch.cat((prefill, decode)) - right).abs().mean() < 0.03 * right.std()


def test_layers_share_the_kernels_of_equal_problems(reference, load):
    linears = load(reference("llama")[1]).decoder.linears
    assert linears["layers.0.qkv"][1].kernels is linears["layers.2.qkv"][1].kernels
    assert linears["layers.0.qkv"][1].kernels is not linears["layers.0.o"][1].kernels


def test_progress_counts_every_layer(reference, load):
    seen = []
    load(reference("llama")[1], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 5) for i in range(1, 6)]


class TestHead:
    """A tied or untied head, stored in any of the ways that checkpoints do."""

    def source(self, model, tools, *, drop=(), add=None):
        tensors = {k: v for k, v in model.state_dict().items() if k not in drop}
        return tools.source(tensors | (add or {}))

    def test_tied_pairs_stored_in_three_ways_give_the_same_logits(self, reference, load, tools):
        model, _ = reference("llama-tied-llama3")
        config, table = model.config.to_dict(), model.state_dict()["model.embed_tokens.weight"]
        sources = [
            self.source(model, tools, drop={"lm_head.weight"}),
            self.source(model, tools, add={"lm_head.weight": table}),
            self.source(model, tools, drop={"model.embed_tokens.weight"}, add={"lm_head.weight": table}),
        ]
        right = tools.logits(model, tools.tokens(8))
        for source in sources:
            runner = load((config, source))
            torch.testing.assert_close(runner.step(("a", tools.tokens(8)))["a"], right, **CLOSE)
            decoder = runner.decoder
            assert decoder.head.weights["weight"].data_ptr() == decoder.embedding.weight.data_ptr()

    def test_a_shared_head_counts_once(self, reference, load):
        tied, untied = (load(reference(n)[1]).decoder for n in ("llama-tied-llama3", "llama"))
        assert untied.nbytes - tied.nbytes == 97 * 72 * 4

    def test_a_head_that_is_missing_on_an_untied_model_is_named(self, reference, load, tools):
        model, _ = reference("llama")
        with pytest.raises(CheckpointError, match=r"no lm_head\.weight.*tie_word_embeddings"):
            load((model.config.to_dict(), self.source(model, tools, drop={"lm_head.weight"})))


class TestRefusals:
    @pytest.mark.parametrize(
        ("tensor", "shape"),
        [
            ("model.layers.1.self_attn.k_proj.weight", (24, 71)),
            ("model.layers.1.mlp.up_proj.weight", (103, 72)),
            ("model.layers.0.input_layernorm.weight", (71,)),
            ("model.embed_tokens.weight", (96, 72)),
        ],
    )
    def test_a_wrong_shape_is_named(self, tensor, shape, reference, load, tools):
        model, _ = reference("llama")
        tensors = model.state_dict() | {tensor: torch.zeros(shape)}
        with pytest.raises(CheckpointError, match=rf"{tensor} has shape \({shape[0]}"):
            load((model.config.to_dict(), tools.source(tensors)))

    def test_a_weight_beyond_half_precision_is_named(self, reference, load, tools):
        model, _ = reference("llama")
        name = "model.layers.2.mlp.down_proj.weight"
        tensors = model.state_dict() | {name: model.state_dict()[name] + 1e5}
        with pytest.raises(ModelError, match=r"layers\.2\.mlp\.down_proj.*bfloat16"):
            load((model.config.to_dict(), tools.source(tensors)), dtype=torch.float16)

    def test_a_length_beyond_the_model_is_refused(self, reference, load):
        with pytest.raises(ModelError, match=r"97 tokens was asked for.*1 to 96"):
            load(reference("llama")[1], max_len=97)

    def test_yarn_stretches_the_length(self, reference, load):
        assert load(reference("qwen2-yarn")[1], max_len=96).decoder.rotary.length == 96

    def test_nothing_is_read_beyond_the_admitted_length(self, reference, load, tools):
        runner = load(reference("llama")[1], max_len=64)
        runner.step(("a", tools.tokens(60)))
        for token in tools.tokens(4):
            runner.step(("a", [token]))
        with pytest.raises(CapacityError, match="65 tokens is longer than the 64 positions"):
            runner.step(("a", [1]))
        with pytest.raises(CapacityError, match="65 tokens"):
            runner.step(("b", tools.tokens(3)), ("c", tools.tokens(65)))
