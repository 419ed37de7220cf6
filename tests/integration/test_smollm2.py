"""The real 135M model: W4 from GGUF against transformers, the BF16 fast path, and what 3 bits cost."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_core.assemble import catalog_for
from deepinfer_core.bench.sample_model import sample_gguf
from deepinfer_core.config import Config
from deepinfer_core.errors import CheckpointError
from deepinfer_core.llm import LLM
from deepinfer_core.quantize import quantize
from deepinfer_core.quantize.perplexity import perplexity, public_domain_text
from deepinfer_core.registry.catalog import Catalog
from deepinfer_core.registry.dispatch import FALLBACK
from deepinfer_core.sampling import SamplingParams

pytestmark = pytest.mark.slow

TOKENS = 32
PROMPTS = (
    "The capital of France is", "Once upon a time", "Water boils at", "The sea is", "My favourite book is",
    "In 1969, humans first", "To bake bread you need", "The opposite of hot is", "A triangle has", "Dogs are",
    "The quick brown fox", "Photosynthesis is the process", "Shakespeare wrote", "The largest planet is", "Music is",
    "def add(a, b):", "1, 2, 3, 4,", "Dear Sir or Madam,", "The recipe begins with", "It was raining, so",
)  # fmt: skip


@pytest.fixture(scope="module")
def gguf() -> Path:
    try:
        return sample_gguf()
    except CheckpointError as error:
        pytest.fail(str(error))


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return catalog_for(Config())


@pytest.fixture(scope="module")
def convert(gguf: Path, catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a converter: recipe name to checkpoint, each made once."""
    made: dict[str, Path] = {}

    def get(recipe: str) -> Path:
        if recipe not in made:
            made[recipe] = tmp_path_factory.mktemp("smollm2") / recipe
            quantize(gguf, made[recipe], recipe, catalog=catalog)
        return made[recipe]

    return get


@pytest.fixture(scope="module")
def exact(convert: Callable[[str], Path], catalog: Catalog) -> LLM:
    """W4 in float32, every layer pinned to core's dequantize + matmul."""
    pins = {"w4a16": {"kernels": {"*": FALLBACK}}}
    return LLM(convert("w4"), catalog=catalog, device="cpu", dtype="float32", linear=pins, max_model_len=1024)


@pytest.fixture(scope="module")
def transformers_model(gguf: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def continued(exact: LLM, transformers_model: Any) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, transformers' greedy continuation) in token ids."""

    def greedy(ids: list[int]) -> list[int]:
        out = transformers_model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=TOKENS,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return [int(t) for t in out[0, len(ids) :]]

    prompts = [exact.tokenizer.encode(text) for text in PROMPTS]
    return [(ids, greedy(ids)) for ids in prompts]


@pytest.fixture(scope="module")
def text(exact: LLM) -> list[int]:
    return exact.tokenizer.encode(public_domain_text())


@pytest.fixture(scope="module")
def source_perplexity(transformers_model: Any, text: list[int]) -> float:
    """Return transformers' perplexity of the GGUF over the fixed text."""

    @torch.no_grad()
    def score(tokens: Any) -> torch.Tensor:
        ids = torch.tensor([list(tokens)])
        scores: torch.Tensor = transformers_model(ids).logits[0, :-1].log_softmax(-1)
        return scores.gather(1, ids[0, 1:, None])[:, 0]

    return perplexity(score, text)[0]


@pytest.fixture(autouse=True, scope="module")
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_greedy_tokens_equal_transformers_on_at_least_18_of_20(
    exact: LLM, continued: list[tuple[list[int], list[int]]]
) -> None:
    assert all(row.kernel.spec.name == FALLBACK for p, s in exact.running.selections.items() if p.scheme == "w4a16"
               for row in s.table.rows)  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = exact.generate([ids for ids, _ in continued], params)
    equal = [list(out.token_ids) == expected for out, (_, expected) in zip(outputs, continued, strict=True)]
    assert sum(equal) >= 18, [p for p, same in zip(PROMPTS, equal, strict=True) if not same]


def test_logits_differ_from_transformers_by_less_than_a_twentieth(
    exact: LLM, transformers_model: Any, continued: list[tuple[list[int], list[int]]]
) -> None:
    for ids, continuation in continued:
        tokens = [*ids, *continuation]
        expected = transformers_model(torch.tensor([tokens])).logits[0]
        assert float((exact.logits(tokens) - expected).abs().mean()) < 0.05


def test_perplexity_equals_transformers_within_half_a_percent(
    exact: LLM, text: list[int], source_perplexity: float
) -> None:
    ours, scored = perplexity(exact.score, text)
    assert scored > 800
    assert ours == pytest.approx(source_perplexity, rel=0.005)


def test_bf16_fast_path_agrees_on_the_likeliest_token(
    exact: LLM,
    convert: Callable[[str], Path],
    catalog: Catalog,
    text: list[int],
    continued: list[tuple[list[int], list[int]]],
    record_property: Any,
) -> None:
    fast = LLM(convert("w4"), catalog=catalog, device="cpu", max_model_len=1024)
    assert fast.running.place.dtype == torch.bfloat16, "the fast path is what a CPU gets without asking"
    same = positions = 0
    difference = 0.0
    for tokens in [text[:768], *[[*ids, *continuation] for ids, continuation in continued]]:
        expected, found = exact.logits(tokens), fast.logits(tokens)
        difference += float((found - expected).abs().mean()) * len(tokens)
        same += int((found.argmax(-1) == expected.argmax(-1)).sum())
        positions += len(tokens)
    agreement, difference = same / positions, difference / positions
    record_property("bf16_mean_absolute_logit_difference", difference)
    record_property("bf16_top1_agreement", agreement)
    print(f"BF16 against float32 over {positions} tokens: mean |logit| {difference:.4f}, top-1 {agreement:.2%}")
    assert agreement >= 0.97
    assert difference < 0.1


@pytest.mark.parametrize(("recipe", "most"), [("w3", 4.5), ("mixed", 2.4)])
def test_three_bits_cost_no_more_perplexity_than_stated(
    recipe: str,
    most: float,
    convert: Callable[[str], Path],
    catalog: Catalog,
    text: list[int],
    source_perplexity: float,
) -> None:
    llm = LLM(convert(recipe), catalog=catalog, device="cpu", dtype="float32", max_model_len=1024)
    assert {p.group_size for p in llm.running.selections if p.scheme == "w3a16"} == {32}
    value, _ = perplexity(llm.score, text)
    print(f"{recipe}: perplexity {value:.2f}, {value / source_perplexity:.2f} times the GGUF's {source_perplexity:.2f}")
    assert value <= most * source_perplexity
