"""From bytes to pages: the KV cache and the longest context that fit, in `plan` and in a running engine alike."""

from __future__ import annotations

from attrs import frozen

from deepinfer_core.config import Config
from deepinfer_core.errors import CapacityError

CPU_KV_BYTES = 1 << 30
"""KV budget on a CPU where the config gives neither memory nor reserve; memory is taken as it is needed, up to this."""

CUDA_RESERVE_BYTES = 384 << 20
"""Card memory left to others (display, driver) where the config gives neither memory nor reserve."""

CUDA_CONTEXT_BYTES = 512 << 20
"""What CUDA, torch and kernel modules take of a card before anything is loaded: an estimate, not a measurement."""


@frozen(kw_only=True)
class StepMemory:
    """What one step needs beside weights and KV cache, whatever it computes; activations come and go with it.

    Attributes:
        activations: Of all tokens of a step, at the widest place of a layer.
        logits: Of the rows that are sampled, and the sampler's scratch.
        kernels: Workspaces of kernels, and what core's fallback decodes at once.
        attention: What attention takes whatever the context is.
        attention_per_token: What it takes for each token of the longest context: keys gathered from pages, and a mask.
        graphs: Captured CUDA graphs.
        overlapped: One lane may compute while another's rows are sampled.
    """

    activations: int
    logits: int
    kernels: int
    attention: int
    attention_per_token: int
    graphs: int = 0
    overlapped: bool = False

    def total(self, context: int) -> int:
        """Return the bytes of the largest step, at a longest context of so many tokens.

        On one lane the layers are done when sampling begins, so the two need not be there at once.
        """
        layers = self.activations + self.attention + self.attention_per_token * context
        both = layers + self.logits if self.overlapped else max(layers, self.logits)
        return both + self.kernels + self.graphs


@frozen(kw_only=True)
class KVFit:
    """A KV cache that fits.

    Attributes:
        pages: How many.
        max_model_len: Longest context of one request.
        wanted: The length that was asked for, or the model's own.
        budget: Bytes that the cache may have.
        page_bytes: Bytes of a page over all layers.
    """

    pages: int
    max_model_len: int
    wanted: int
    budget: int
    page_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.page_bytes

    @property
    def shrunk(self) -> bool:
        """The context is shorter than what was wanted."""
        return self.max_model_len < self.wanted


def reserve_bytes(config: Config) -> int:
    """Return what to leave free on a card; nothing where the config says what to take instead."""
    if config.cache.reserve is not None:
        return config.cache.reserve
    return CUDA_RESERVE_BYTES if config.cache.memory is None else 0


def fit_kv(config: Config, model_length: int, page_bytes: int, room: int, step: StepMemory | None = None) -> KVFit:
    """Turn a number of bytes into pages and a longest context: no more pages than all requests at full length can use.

    Args:
        config: Asks for a length, a page size and a number of requests.
        model_length: Longest context that the model allows.
        page_bytes: Bytes of a page over all layers.
        room: Bytes for the KV cache, and for ``step`` where that is given.
        step: What a step takes out of the room; None where the room is the cache's alone.

    Raises:
        CapacityError: It does not hold one page, or one context of the length that the config asks for.
    """
    cache = config.cache
    wanted = cache.max_model_len or model_length
    each = -(-wanted // cache.page_size)
    longest = wanted
    if step is not None and each * page_bytes > room - step.total(wanted):
        longest = _longest(cache.page_size, page_bytes, room, step, wanted)
    budget = room if step is None else room - step.total(longest)
    pages = min(max(0, budget) // page_bytes, each * config.scheduler.max_requests)
    if pages < 1 or (cache.max_model_len is not None and pages < each):
        raise CapacityError(
            f"a context of {wanted} tokens needs {each * page_bytes / 2**20:,.1f} MiB of KV cache "
            f"({page_bytes / 2**10:,.1f} KiB a page of {cache.page_size}), the budget is {max(0, budget) / 2**20:,.1f} "
            "MiB; lower [cache] max_model_len or raise [cache] memory; `deepinfer plan` shows what takes the rest"
        )
    longest = min(wanted, longest, pages * cache.page_size)
    return KVFit(pages=pages, max_model_len=longest, wanted=wanted, budget=budget, page_bytes=page_bytes)


def _longest(page_size: int, page_bytes: int, room: int, step: StepMemory, wanted: int) -> int:
    """Return the longest context whose pages and scratch fit together, in whole pages; at least one."""
    low, high = 1, -(-wanted // page_size)
    while low < high:
        middle = (low + high + 1) // 2
        if middle * page_bytes <= room - step.total(middle * page_size):
            low = middle
        else:
            high = middle - 1
    return min(wanted, low * page_size)
