"""A device for tests, ``torch.device("pretend")``: an accelerator as far as PyTorch can tell, see `device.cpp`."""
