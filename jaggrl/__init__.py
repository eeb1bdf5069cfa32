"""jaggrl: any flow model x any reward x any RL algorithm x any backward strategy, each one line of config."""

__version__ = "0.1.0"
