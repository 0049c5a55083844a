"""Training of learned policies on frozen backbones."""
