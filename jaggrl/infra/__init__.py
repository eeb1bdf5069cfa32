"""Everything around the training itself: run folders, checkpoints, logs, reports, the command line, sweeps."""
