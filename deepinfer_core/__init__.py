"""deepinfer: quantized LLM inference on one GPU, assembled from plugins by name."""

__version__: str


def __getattr__(name: str) -> str:
    """Return ``__version__``, looked up when it is asked for: the look-up is slower than all else at the start."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata

    try:
        return metadata.version("deepinfer-core")
    except metadata.PackageNotFoundError:  # a source tree on sys.path that was never installed
        return "0.0.0+source"
