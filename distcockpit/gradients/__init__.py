"""Per-sample gradient algebra: from the factors of a layer to sums over individual gradients."""
