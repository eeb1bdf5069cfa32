"""Parts of the benchmark: what is measured (subject) and with what (meters)."""
