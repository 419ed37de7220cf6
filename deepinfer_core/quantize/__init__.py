"""Offline conversion of models: recipes, checks, the conversion itself, and its report."""

from deepinfer_core.quantize.convert import quantize
from deepinfer_core.quantize.report import LayerReport, PerplexityReport, QuantizationReport, write_report

__all__ = ["LayerReport", "PerplexityReport", "QuantizationReport", "quantize", "write_report"]
