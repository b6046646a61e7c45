"""Causal language models that are trained: `hf` (transformers, LoRA) and `packing` (layout and micro-batches)."""
