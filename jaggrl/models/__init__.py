"""Model adapters: conversions between the framework's conventions and a diffusers pipeline, and nothing else."""
