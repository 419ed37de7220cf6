"""What the decoder must know of a model, read from its config; no torch here."""

from __future__ import annotations

from attrs import frozen

from deepinfer_core.layers.rope import RopeSpec, RopeType

__all__ = ["ModelSpec", "RopeSpec", "RopeType"]


@frozen(kw_only=True)
class ModelSpec:
    """A decoder-only model of the Llama, Qwen2, Qwen3 or Mistral family.

    Attributes:
        architecture: The HF class name, such as ``"LlamaForCausalLM"``.
        vocab_size: Rows of the embedding and of the head.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP.
        layers: Decoder layers.
        heads: Query heads.
        kv_heads: Key and value heads; query head h reads kv head ``h // (heads // kv_heads)``.
        head_dim: Width of one head; ``heads * head_dim`` need not be ``hidden_size``.
        rms_eps: Added to the mean square in every norm.
        rope: Rotary embedding.
        qkv_bias: q, k and v have a bias.
        o_bias: The attention output has a bias.
        mlp_bias: gate, up and down have a bias.
        qk_norm: q and k are normed per head before the rotation.
        tie_word_embeddings: The head is the embedding.
        sliding_windows: One entry per layer: tokens a query may look back over, itself included; None for all.
        max_length: Longest context that the config allows, extensions included, in tokens.
        dtype: Dtype that the config names for its weights; None where it names none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeSpec
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    max_length: int
    dtype: str | None = None

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return float(self.head_dim**-0.5)

    @property
    def q_size(self) -> int:
        """Output features of q, and input features of o."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Output features of k, and of v."""
        return self.kv_heads * self.head_dim
