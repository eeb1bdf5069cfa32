"""Everything around the training: ranks, run folders, checkpoints, logs, reports, command line, sweeps."""
