"""Samplers: engines that write responses under `protocols.Sampler`. `torch` runs in this process."""
