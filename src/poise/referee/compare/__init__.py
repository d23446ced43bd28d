"""Comparisons of methods over several seeds: plan, runs, results, statistics, and the page."""
