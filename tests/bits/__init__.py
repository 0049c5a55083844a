"""What is equal to the bit, in the code that XLA makes by default."""
