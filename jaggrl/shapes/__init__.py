"""The shapes world: small pictures of coloured shapes, captions, a rule-based verifier, shipped weights."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
"""Folder of the shipped weights: `flux`, `hpsv2`, `pickscore`, `clipscore`, each with a card."""
