"""Erasing spans from a processed context: what is asked, how methods are measured."""
