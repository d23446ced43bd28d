"""Comparisons of methods over several seeds: the results of their runs, statistics, and the page that shows them."""
