"""Trainable modules beside a frozen backbone: what they compute, and how they are kept in files."""
