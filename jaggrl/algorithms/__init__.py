"""Algorithms: what the rollout records, how rewards become credit, and the windows of an update."""
