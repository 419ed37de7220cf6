"""Rotary tables against transformers' own, for every variant that configs ask for."""

import pytest
import torch

from deepinfer_core.layers.rotary import Rotary, inverse_frequencies
from deepinfer_core.model.hf_config import model_spec_from_hf

BASE = {
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 4096,
}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}

VARIANTS = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "default-1e6": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, **YARN},
    "yarn-attention-factor": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "attention_factor": 1.25},
    "yarn-mscale": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn-mscale-alone": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "mscale": 0.707},
    "yarn-betas": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn-no-truncate": {"rope_type": "yarn", "rope_theta": 1.5e5, **YARN, "truncate": False},
    "yarn-narrow": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "beta_fast": 1.0, "beta_slow": 1.0},
}


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_frequencies_and_tables_equal_those_of_transformers(family, variant):
    import importlib

    import transformers

    values = BASE | ({"head_dim": 128} if family == "Qwen3" else {})
    config = getattr(transformers, f"{family}Config")(**values, rope_parameters=dict(VARIANTS[variant]))
    module = importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    theirs = getattr(module, f"{family}RotaryEmbedding")(config)
    spec = model_spec_from_hf({**config.to_dict(), "architectures": [f"{family}ForCausalLM"]})

    assert torch.equal(inverse_frequencies(spec.rope, spec.head_dim), theirs.inv_freq)

    positions = torch.tensor([0, 1, 17, 1023, 1024, 4095])
    right_cos, right_sin = theirs(torch.zeros(1), positions[None])
    rotary = Rotary(spec.rope, spec.head_dim, 4096, device="cpu", dtype=torch.float32)
    heads = torch.randn(6, 3, spec.head_dim, generator=torch.Generator().manual_seed(0))
    right, _ = module.apply_rotary_pos_emb(heads[None], heads[None], right_cos, right_sin, unsqueeze_dim=2)
    found = rotary.rotate_(heads.clone(), rotary.at(positions, 4096))
    torch.testing.assert_close(found, right[0], rtol=1e-5, atol=1e-5)
