"""deepinfer: quantized LLM inference on one GPU, assembled from plugins by name."""

from importlib import metadata

try:
    __version__ = metadata.version("deepinfer-core")
except metadata.PackageNotFoundError:  # a source tree on sys.path that was never installed
    __version__ = "0.0.0+source"
