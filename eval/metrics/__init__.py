"""Metrics of the data sets, each as its official scorer defines it; scores are in [0, 1]."""
