"""Admission: what can be refused at once is refused at once, in the submitter's thread, before any work."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from deepinfer_core.errors import CapacityError, RequestError
from deepinfer_core.sampling import SamplingParams


@frozen(kw_only=True)
class Admission:
    """The limits that a request is checked against.

    Attributes:
        vocab_size: Tokens of the model.
        max_model_len: Longest context of one request, in tokens.
        page_size: Tokens of a KV page.
        total_pages: KV pages that there are.
    """

    vocab_size: int
    max_model_len: int
    page_size: int
    total_pages: int

    def check(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Check a request and return the most tokens that it may generate.

        Raises:
            RequestError: The prompt is empty, or holds what is no token of the model; a sampling value does not fit it.
            CapacityError: Prompt and answer can never fit the model's length or the KV pages.
        """
        params.check_for(self.vocab_size)
        if not len(prompt):
            raise RequestError("the prompt is empty: a model needs at least one token to continue")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise RequestError(f"the prompt holds token {token!r}; the model's vocabulary has {self.vocab_size}")
        pool = self.total_pages * self.page_size
        room = min(self.max_model_len, pool) - len(prompt)
        most = max(room, 1) if params.max_tokens is None else params.max_tokens
        if len(prompt) + most > self.max_model_len:
            raise CapacityError(
                f"the prompt has {len(prompt)} tokens and {most} may be generated, but max_model_len is "
                f"{self.max_model_len}; shorten the prompt, lower max_tokens, or raise [cache] max_model_len"
            )
        if len(prompt) + most > pool:
            raise CapacityError(
                f"{len(prompt)} prompt and {most} generated tokens need {-(-(len(prompt) + most) // self.page_size)} "
                f"KV pages, the cache has {self.total_pages}; lower max_tokens or raise [cache] memory"
            )
        if params.min_tokens > most:
            raise RequestError(f"min_tokens = {params.min_tokens}: only {most} tokens may be generated")
        return most
