"""Schedules, transition kernels, solvers and the cutting of trajectories into windows."""
