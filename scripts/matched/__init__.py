"""Parts of ``reproduce_claims.py`` and ``compare_algorithms.py``: runs, verdicts on curves, forces of an update."""
