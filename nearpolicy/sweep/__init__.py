"""Sweeps: a grid of settings and seeds as one command, and the comparison of its runs with intervals."""
