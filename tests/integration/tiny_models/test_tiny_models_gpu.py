"""The decoder on a card against the same decoder on the CPU in float32."""

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [
        (torch.float32, None, 0.001),
        (torch.float16, None, 0.015),
        (torch.bfloat16, None, 0.1),
        (torch.float16, "int8", 0.05),
    ],
    ids=["float32", "float16", "bfloat16", "int8 cache"],
)
def test_chunks_decodes_and_mixed_batches_equal_the_cpu(name, dtype, kv_dtype, tolerance, make_model, load, tools):
    model = make_model(name)
    config, source = model.config.to_dict(), tools.source(model.state_dict())
    right = {which: tools.logits(model, tools.tokens(30, seed)) for which, seed in (("a", 1), ("b", 2))}
    runner = load((config, source), dtype=dtype, kv_dtype=kv_dtype, device="cuda")
    runner.fragment(40)
    a, b = tools.tokens(30, 1), tools.tokens(30, 2)
    found = {"a": [], "b": []}
    plan = [
        {"a": a[:11]},
        {"b": b[:20], "a": a[11:19]},
        *({"a": a[i : i + 1], "b": b[i + 1 : i + 2]} for i in range(19, 29)),
        {"a": a[29:]},
    ]
    for step in plan:
        for which, logits in runner.step(*step.items()).items():
            found[which].append(logits.cpu())
    for which, logits in right.items():
        difference = (torch.cat(found[which]) - logits).abs()
        assert difference.mean() < tolerance * logits.std()


def test_a_tied_head_shares_the_card_memory_of_the_embedding(make_model, load, tools):
    model = make_model("llama-tied-llama3")
    decoder = load(
        (model.config.to_dict(), tools.source(model.state_dict())), dtype=torch.float16, device="cuda"
    ).decoder
    assert decoder.head.weights["weight"].data_ptr() == decoder.embedding.weight.data_ptr()
    assert decoder.embedding.weight.is_cuda
