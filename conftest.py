"""What every test runs under: no network for model hubs, one thread per core, and GPU tests only where a card is."""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


import pytest

# A suite started in the background of a plain shell inherits an ignored SIGINT, and so would the processes that tests
# start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _why_no_gpu() -> str | None:
    """Return why GPU tests cannot run here, None when they can."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA card that torch can use"
    try:
        import cupy  # noqa: F401
    except ImportError:
        return "CuPy is not installed: pip install 'deepinfer-core[cuda12]' or [cuda13]"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu with a plain reason where they cannot run."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
