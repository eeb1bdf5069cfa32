"""Rewards: ``(media, prompts) -> (B,)``. One file per scorer; nothing is imported until a config names it."""
