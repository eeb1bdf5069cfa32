"""Backward strategies: ``interpolant x graph x route``. None of them ever sees an algorithm."""
