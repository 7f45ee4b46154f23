"""fxc: compiles PyTorch models for serving, ahead of time."""
