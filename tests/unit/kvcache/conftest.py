import pytest
import torch

from deepinfer_core.kvcache.manager import KVCache


class TwoTensorBackend:
    """The least that a KVCache asks of an attention backend: shapes, and how a page is copied."""

    def __init__(self, page_size):
        self.page_size = page_size

    def kv_tensors(self, pages):
        return {"k": ((pages, self.page_size, 2), "float32"), "scale": ((pages, self.page_size), "float16")}

    def copy_page(self, kv, source, target):
        for tensor in kv.values():
            tensor[target] = tensor[source]


@pytest.fixture
def make_kv():
    def make(pages=8, page_size=4, layers=2, **options):
        return KVCache(TwoTensorBackend(page_size), layers=layers, page_size=page_size, pages=pages, **options)

    return make


@pytest.fixture
def fill():
    """Compute tokens of a sequence: its KV is the token itself, so that a wrong page shows as a wrong value."""

    def run(kv, seq, tokens):
        kv.extend(seq, len(tokens))
        batch = kv.batch([(seq, len(tokens))])
        for layer in kv.tensors:
            flat = layer["k"].view(-1, 2)
            flat[batch.slots] = torch.tensor(tokens, dtype=torch.float32)[:, None]
        kv.commit(seq, len(tokens))

    return run


@pytest.fixture
def read():
    """Read the tokens of a sequence back through its page table, from the last layer."""

    def run(kv, seq):
        pages = kv.tensors[-1]["k"][torch.tensor(seq.pages, dtype=torch.long)]
        return pages.reshape(-1, 2)[: seq.length, 0].long().tolist()

    return run
