"""What every checkpoint can be asked, whatever files it lies in; tied heads are resolved here, once."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attrs import frozen

from deepinfer_core.checkpoint.end_tokens import end_token_ids
from deepinfer_core.checkpoint.format import DENSE, LayerFormat
from deepinfer_core.errors import CheckpointError, nearest

if TYPE_CHECKING:
    import torch

    from deepinfer_core.plugin_api import WeightSchemeSpec

logger = logging.getLogger("deepinfer")

EMBEDDING = "model.embed_tokens.weight"
HEAD_MODULE = "lm_head"
HEAD = f"{HEAD_MODULE}.weight"

Kind = Literal["deepinfer", "hf", "gguf"]
FLOATS = ("float16", "bfloat16", "float32", "float64")


@frozen
class SourceGroups:
    """Groups along K in which a source's values were quantized; ``group_size`` 0 when they were not."""

    group_size: int = 0
    zeros: bool = False


class Checkpoint(ABC):
    """A model's files, opened and checked; tensors are read one at a time.

    Names are those of the Hugging Face model (``model.layers.0.self_attn.q_proj.weight``) whatever the files call
    them; a quantized layer has its scheme's tensors (``<module>.packed``, ...) instead of ``<module>.weight``.

    Attributes:
        path: Directory or file that was opened.
        kind: ``"deepinfer"``, ``"hf"`` (dense safetensors) or ``"gguf"``.
        hf_config: The model's config in the form of a Hugging Face config.json.
        generation_config: Content of generation_config.json; empty when there is none.
        tokenizer_path: Directory that the tokenizer is loaded from.
        tokenizer_gguf: Name of the GGUF file in it that holds the tokenizer; None when it lies in files of its own.
    """

    path: Path
    kind: Kind
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_path: Path
    tokenizer_gguf: str | None

    @abstractmethod
    def stored_names(self) -> frozenset[str]:
        """Return the names of all tensors in the files, as they are, a tied head's copy included."""

    @abstractmethod
    def _stored_shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def _stored_dtype(self, name: str) -> str: ...

    @abstractmethod
    def _read(self, name: str) -> torch.Tensor: ...

    @abstractmethod
    def layer_format(self, module: str) -> LayerFormat:
        """Return how a linear layer is stored, by module name (``model.layers.0.mlp.up_proj``)."""

    @abstractmethod
    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""

    def close(self) -> None:  # noqa: B027 - nothing to close is the usual case
        """Let go of open files."""

    @property
    def config_file(self) -> Path:
        """The file that `hf_config` comes from, for error messages."""
        return self.path if self.kind == "gguf" else self.path / "config.json"

    @property
    def tied(self) -> bool:
        """True when the head is the embedding: the config ties them and the head is not quantized on its own."""
        return bool(self.hf_config.get("tie_word_embeddings", False)) and self.layer_format(HEAD_MODULE).dense

    def names(self) -> frozenset[str]:
        """Return logical tensor names; of a tied pair the embedding alone, whichever of the two is stored."""
        stored = self.stored_names()
        if not self.tied or HEAD not in stored:
            return stored
        return (stored - {HEAD}) | {EMBEDDING}

    def has(self, name: str) -> bool:
        """Return whether a logical tensor exists."""
        return name in self.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return self._stored_shape(self._resolve(name))

    def dtype(self, name: str) -> str:
        """Return the torch dtype name in which `tensor` returns it, without reading it."""
        return self._stored_dtype(self._resolve(name))

    def written_dtype(self, name: str) -> str:
        """Return the torch dtype name in which a conversion stores a dense tensor: its own, unless it was packed."""
        return self.dtype(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a dense tensor (norm, embedding, bias, unquantized weight) in its stored dtype, on the CPU.

        Raises:
            CheckpointError: It does not exist, or does not hold floating values.
        """
        stored = self._resolve(name)
        if self._stored_dtype(stored) not in FLOATS:
            raise self._not_floating(name)
        return self._read(stored)

    def layer_tensors(self, module: str) -> dict[str, torch.Tensor]:
        """Return a layer's canonical tensors: ``weight`` when dense, else those of its scheme, without the bias.

        Raises:
            CheckpointError: None of them exists.
        """
        if self.layer_format(module).dense:
            return {"weight": self.tensor(f"{module}.weight")}
        return {name.rpartition(".")[2]: self._read(name) for name in self._scheme_tensors(module)}

    def source_groups(self, module: str) -> SourceGroups:
        """Return the groups in which a layer's values were quantized before, so that a recipe can keep them."""
        form = self.layer_format(module)
        return SourceGroups() if form.dense else SourceGroups(form.group_size, form.zeros)

    def eos_token_ids(self) -> frozenset[int]:
        """Return the end-of-text ids of config, generation config and GGUF keys together.

        Raises:
            CheckpointError: One of them is neither an id, a list of ids, nor null.
        """
        return end_token_ids(
            [
                (f"{self.path}: config", self.hf_config),
                (f"{self.path}: generation config", self.generation_config),
            ]
        )

    def verify(
        self,
        required: Iterable[str] | Mapping[str, tuple[int, ...]],
        *,
        schemes: Mapping[str, WeightSchemeSpec] | None = None,
    ) -> None:
        """Check that every tensor a model needs is there, before anything is allocated.

        Args:
            required: Logical names as of a dense model (``model.norm.weight``, ``lm_head.weight``); with their shapes
                when it is a mapping, which are then compared. For a quantized layer ``<module>.weight`` stands for
                its scheme's tensors.
            schemes: Scheme name -> descriptor; with it (and shapes) the tensors of quantized layers are compared too.

        Tensors that nothing asked for are named in one warning.

        Raises:
            CheckpointError: Listing what is missing or has another shape, with the files looked into.
        """
        shapes = required if isinstance(required, Mapping) else dict.fromkeys(required)
        names, used = self.names(), set[str]()
        missing: list[str] = []
        for name, shape in shapes.items():
            module = name.removesuffix(".weight")
            form = self.layer_format(module) if self._is_linear(name, shape) else DENSE
            if not form.dense:
                used |= self._verify_quantized(module, form, shape, missing, schemes)
                continue
            logical = EMBEDDING if name == HEAD and self.tied else name
            used.add(logical)
            if logical not in names:
                if logical not in missing:  # a tied head asks for the embedding a second time
                    missing.append(logical)
            elif self.dtype(logical) not in FLOATS:
                raise self._not_floating(logical)
            elif shape is not None and self.shape(logical) != tuple(shape):
                raise CheckpointError(
                    f"{self.file_of(self._resolve(logical))}: {logical} has shape {list(self.shape(logical))}, "
                    f"the config asks for {list(shape)}"
                )
        if missing:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise CheckpointError(f"{self.path}: missing tensors ({len(missing)}): {shown}; download the model again")
        extras = sorted(n for n in names - used if not n.endswith(".rotary_emb.inv_freq"))
        if extras:
            shown = ", ".join(extras[:8]) + (f" and {len(extras) - 8} more" if len(extras) > 8 else "")
            logger.warning("%s: %d tensors that this model does not use: %s", self.path, len(extras), shown)

    def _is_linear(self, name: str, shape: tuple[int, ...] | None) -> bool:
        """Patterns such as ``model.layers.*`` match norms too, but speak of linear layers alone."""
        if name == EMBEDDING or not name.endswith(".weight"):
            return False
        return name not in self.stored_names() if shape is None else len(shape) == 2

    def _verify_quantized(
        self,
        module: str,
        form: LayerFormat,
        shape: tuple[int, ...] | None,
        missing: list[str],
        schemes: Mapping[str, WeightSchemeSpec] | None,
    ) -> set[str]:
        """Check one quantized layer; returns the names it uses and adds to ``missing``."""
        spec = (schemes or {}).get(form.scheme)
        present = {n for n in self.stored_names() if n.rpartition(".")[0] == module} - {f"{module}.bias"}
        if spec is None:
            if not present:
                missing.append(f"{module}.packed")
            return present
        if form.group_size == 0 and any(part.per == "group" for part in spec.stored(zeros=form.zeros)):
            raise CheckpointError(
                f"{self.path}: {module} is {form.scheme} with group_size 0, but {form.scheme} stores scales by group; "
                "correct quantization_config or convert the model again"
            )
        for part in spec.stored(zeros=form.zeros):
            name = f"{module}.{part.name}"
            if name not in present:
                missing.append(name)
            elif shape is not None:
                n, k = shape
                expected = (n, part.columns(k, form.group_size))
                dtype = self._stored_dtype(name)
                if self._stored_shape(name) != expected or part.dtype not in (dtype, "act"):
                    raise CheckpointError(
                        f"{self.file_of(name)}: {name} is {dtype} {list(self._stored_shape(name))}, but {form} for "
                        f"{n} x {k} needs {part.dtype} {list(expected)}; the config and the tensors disagree on bits, "
                        "group or shape"
                    )
        return present

    def _scheme_tensors(self, module: str) -> list[str]:
        found = sorted(n for n in self.stored_names() if n.rpartition(".")[0] == module and n != f"{module}.bias")
        if not found:
            raise CheckpointError(
                f"{self.path}: layer {module} should be {self.layer_format(module)}, but it has no tensors"
            )
        return found

    def _not_floating(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file_of(self._resolve(name))}: {name} is {self.dtype(name)}; a dense weight must be floating"
        )

    def _resolve(self, name: str) -> str:
        """Return the stored name of a logical one."""
        stored = self.stored_names()
        if self.tied and name in (EMBEDDING, HEAD):
            name = EMBEDDING if EMBEDDING in stored else HEAD
        if name not in stored:
            raise CheckpointError(f"{self.path} has no tensor {name}; {nearest(name, self._alike(name))}")
        return name

    def _alike(self, name: str) -> list[str]:
        """Return the tensors of the same module, or a few others, for an error message."""
        module = name.rpartition(".")[0]
        return [n for n in self.stored_names() if n.startswith(f"{module}.")] or sorted(self.stored_names())[:4]
