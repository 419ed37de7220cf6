"""Tiny random models made by transformers, and our decoder over the same files with real plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.model.decoder import Decoder
from deepinfer_core.model.hf_config import model_spec_from_hf
from deepinfer_core.model.shapes import attention_problem, required_tensors
from deepinfer_core.registry.catalog import Catalog, make
from deepinfer_core.registry.discovery import discover
from deepinfer_core.registry.select import select_attention, select_linear

VOCAB = 97
PAGE = 4


class Format(NamedTuple):
    """A stored form, as `WeightFormat` asks."""

    scheme: str = "fp16"
    group_size: int = 0
    zeros: bool = False


class DictSource:
    """A checkpoint in memory: dense tensors by name, quantized modules by name."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        quantized: Mapping[str, tuple[Format, Mapping[str, torch.Tensor]]] | None = None,
    ) -> None:
        self.tensors = dict(tensors)
        self.quantized = dict(quantized or {})

    def has(self, name: str) -> bool:
        return name in self.tensors

    def layer_format(self, module: str) -> Format:
        return self.quantized[module][0] if module in self.quantized else Format()

    def layer_tensors(self, module: str) -> Mapping[str, torch.Tensor]:
        if module in self.quantized:
            return self.quantized[module][1]
        return {"weight": self.tensors[f"{module}.weight"]}

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


class Runner:
    """A decoder with its KV cache; sequences are called by name."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.decoder = decoder
        self.cache = cache
        self.open: dict[str, Any] = {}

    def step(self, *items: tuple[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Run the next tokens of each named sequence in one forward; logits of all of them by name."""
        spans = []
        for name, tokens in items:
            seq = self.open.setdefault(name, None) or self.cache.open(reuse=False)
            self.open[name] = seq
            self.cache.extend(seq, len(tokens))
            spans.append((seq, len(tokens)))
        tokens = torch.tensor([token for _, its in items for token in its], device=self.decoder.device)
        logits = self.decoder.forward(tokens, self.cache.batch(spans), self.cache.tensors, None)
        for seq, count in spans:
            self.cache.commit(seq, count)
        assert logits.dtype == torch.float32
        return dict(zip([name for name, _ in items], logits.split([n for _, n in spans]), strict=True))

    def fragment(self, pages: int) -> None:
        """Leave every other page taken, so that nothing that follows lies in one piece."""
        held = [self.cache.pool.alloc(1)[0] for _ in range(pages)]
        for page in held[::2]:
            self.cache.pool.free(page)


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return Catalog.from_discovery(discover())


@pytest.fixture(scope="session")
def load(catalog: Catalog) -> Callable[..., Runner]:
    """Return a loader: a model directory, or (config, source), to a `Runner`."""

    def load(
        model: Path | tuple[Mapping[str, Any], DictSource],
        *,
        dtype: torch.dtype = torch.float32,
        kv_dtype: str | None = None,
        max_len: int | None = None,
        device: str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> Runner:
        source: Any
        if isinstance(model, Path):
            from deepinfer_core.checkpoint.reader import open_checkpoint  # needs gguf, which GPU machines may lack

            source = open_checkpoint(model)
            spec = model_spec_from_hf(source.hf_config)
            source.verify(required_tensors(spec))
        else:
            config, source = model
            spec = model_spec_from_hf(config)
        act = str(dtype).removeprefix("torch.")
        problem = attention_problem(
            spec,
            page_size=PAGE,
            act_dtype=act,
            kv_dtype=kv_dtype or act,
            device=device,
            capability=torch.cuda.get_device_capability() if device == "cuda" else None,
            max_batched_tokens=64,
            max_requests=8,
            max_model_len=max_len or spec.max_length,
        )
        chosen = select_attention(catalog, problem, "sdpa").spec
        backend = make(chosen.spec.factory, chosen, problem)
        decoder = Decoder.load(
            spec,
            source,
            select=lambda wanted: select_linear(catalog, wanted),
            attention=backend,
            device=device,
            dtype=dtype,
            m_max=64,
            max_len=max_len,
            progress=progress,
        )
        cache = KVCache(backend, layers=spec.layers, page_size=PAGE, pages=96, device=device, prefix_cache=False)
        return Runner(decoder, cache)

    return load


LLAMA = {
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": VOCAB,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
}
QWEN3 = LLAMA | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama-tied-llama3": ("Llama", LLAMA | {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama-biases-linear": (
        "Llama",
        LLAMA
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "qwen2": (
        "Qwen2",
        LLAMA | {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen2-yarn": ("Qwen2", LLAMA | {"rope_parameters": YARN}),
    "qwen2-window-upper": ("Qwen2", LLAMA | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", QWEN3),
    "qwen3-biases": ("Qwen3", QWEN3 | {"attention_bias": True, "sliding_window": 3}),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 6}),
    "mistral-full": ("Mistral", LLAMA | {"sliding_window": None, "head_dim": 16}),
}


def make_reference(name: str) -> Any:
    """Return a transformers model with every parameter random: norms and biases are not left at one and zero."""
    import transformers

    family, values = MODELS[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, f"{family}Config")(**values)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Return a maker: a model's name to (the transformers model, the directory that it is saved in), made once."""
    made: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in made:
            model = make_reference(name)
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path)
            made[name] = model, path
        return made[name]

    return get


@pytest.fixture
def make_model() -> Callable[[str], Any]:
    """Return a maker of a fresh transformers model, for tests that change its weights."""
    return make_reference


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def reference_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits of every position, without any cache."""
    logits: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


@pytest.fixture(scope="session")
def tools() -> Any:
    """Return the plain functions above; test modules cannot import a conftest."""

    class Tools:
        tokens = staticmethod(tokens_of)
        logits = staticmethod(reference_logits)
        source = DictSource
        format = Format

    return Tools


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for ``name`` with every model."""
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", list(MODELS))
