"""Parts of the step profile: who keeps time (ledger), what is timed (subject), how it is told (report)."""
